"""Misuse of what measures, places, shares, describes and exports pairs; as in `misuse_cases`."""

from types import SimpleNamespace
from unittest import mock

from repositories import SMALL, pair
from tiny import tiny

from hf_specx.cards import known_card
from hf_specx.checks_tune import check_drafts, check_reads, check_study, looking_for
from hf_specx.export import vllm
from hf_specx.pair_config import ModelSource, PairConfig
from hf_specx.placement import plan
from hf_specx.shares import complete


def exported(target: ModelSource, draft: ModelSource):
    return lambda: vllm(PairConfig(target, draft), "org/pair")


def placed(**options: object):
    config = tiny(**SMALL).config
    return lambda: plan(config, config, **{"device_map": "auto", "max_memory": {"cpu": "1GB"}} | options)


def completed(texts: object = ("a",), tokenizer: object = ..., **options: object):
    def misuse() -> None:
        given = {"target": pair().target, "draft": pair().draft, "generate": None}
        complete(
            SimpleNamespace(**given, tokenizer=pair().tokenizer if tokenizer is ... else tokenizer), texts, **options
        )

    return misuse


def in_shards() -> None:
    """As FSDP marks what it has spread."""
    target, draft = (tiny(**SMALL) for _ in range(2))
    draft._is_fsdp_managed_module = True
    with mock.patch("hf_specx.peers.world_size", return_value=2):
        complete(SimpleNamespace(target=target, draft=draft, tokenizer=pair().tokenizer, generate=None), ["a"])


def not_found() -> None:
    with looking_for("org/none"):
        raise OSError("no route")


TARGET, DRAFT = ModelSource("org/target"), ModelSource("org/draft")
CASES = {
    "unknown_known_pair": ("no well-known pair is called 'qwen9'", lambda: known_card("qwen9")),
    "drafts_that_are_one": ("give at least one, and each once", lambda: check_drafts(["a", "a"], [])),
    "drafts_that_are_one, none": ("give at least one", lambda: check_drafts([], [])),
    "revisions_of_other_drafts": ("2 revisions were given for 1 drafts", lambda: check_drafts(["a"], ["v1", "v2"])),
    "batches_of_no_size": ("no different sizes of 1 or more; give", lambda: check_study([0], 1)),
    "batches_of_no_size, twice": ("no different sizes", lambda: check_study([2, 2], 1)),
    "repeats_without_a_run": ("repeats=0 times nothing; give", lambda: check_study([1], 0)),
    "name_that_is_not_found": (
        "'org/none' cannot be got from the Hub, and there is no folder of that name here: no route",
        not_found,
    ),
    "prompts_without_tokenizer": ("'a' has no tokenizer, so it cannot read", lambda: check_reads("a", None)),
    "server_without_subfolders": (
        "draft is in the subfolder 'small' of 'org/draft', and vLLM loads roots only; save",
        exported(TARGET, ModelSource("org/draft", subfolder="small")),
    ),
    "server_without_subfolders, inside": (
        "of 'org/pair', and vLLM loads no subfolder",
        exported(ModelSource(vocab_size=4), ModelSource(subfolder="draft", vocab_size=4)),
    ),
    "server_without_encoder_decoders": (
        "the target is an encoder-decoder .AutoModelForSeq2SeqLM., which vLLM does not serve",
        exported(ModelSource("org/target", model_type="t5"), DRAFT),
    ),
    "draft_called_like_another_method": (
        "the draft 'org/my-dflash' has 'dflash' in its name, .*rename or move it",
        exported(TARGET, ModelSource("org/my-dflash")),
    ),
    "padded_vocabulary_inside": (
        "the target scores 5 tokens and the draft 4; .*save the pair with draft='reference'",
        exported(ModelSource("org/target", vocab_size=5), ModelSource(vocab_size=4)),
    ),
    "draft_over_several_devices": ("='balanced' spreads the draft over devices", placed(draft_device_map="balanced")),
    "room_for_no_tokens": ("cache_tokens=-1 is no number of tokens; give", placed(cache_tokens=-1)),
    "texts_of_no_kind": ("texts='def' is not a list of strings; put", completed("def")),
    "batch_of_no_rows": ("batch_size=0 is no number of rows; give 1", completed(batch_size=0)),
    "seed_of_no_prompt": ("seed=-1 is not in the range of gen.*give an int", completed(seed=-1)),
    "options_of_one_call": ("seeds= belongs to one call of generate; leave", completed(seeds=[1])),
    "texts_without_tokenizer": ("the pair has no tokenizer to read texts with", completed(tokenizer=None)),
    "models_in_shards": ("the models are spread over processes", in_shards),
    "text_without_tokens": ("prompt 1 is empty, and the tokenizer puts nothing", completed(["a", ""])),
}
