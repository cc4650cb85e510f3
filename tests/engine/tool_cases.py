"""Misuse of what measures, checks, places, shares, describes and exports pairs; as in `plain_cases`."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from repositories import SMALL, pair
from tiny import tiny

from hf_specx import DraftTargetPair
from hf_specx.bench.checks import looking_for
from hf_specx.bench.store import read_cells
from hf_specx.bench.study import Study
from hf_specx.bench.tune import Loaded, encode_batches, tune
from hf_specx.bench.ways import way
from hf_specx.hub.cards import known_card
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.vllm import vllm
from hf_specx.metrics import path
from hf_specx.metrics.check import subject_of
from hf_specx.metrics.page import check_can_write
from hf_specx.metrics.settings import Settings
from hf_specx.pairs.complete import complete
from hf_specx.pairs.placement import plan
from hf_specx.pairs.results_file import check_results_path


def exported(target: ModelSource, draft: ModelSource):
    return lambda: vllm(PairConfig(target, draft), "org/pair")


def placed(**options: object):
    config = tiny(**SMALL).config
    return lambda: plan(config, config, **{"device_map": "auto", "max_memory": {"cpu": "1GB"}} | options)


def completed(texts: object = ("a",), tokenizer: object = ..., **options: object):
    def misuse() -> None:
        given = pair().tokenizer if tokenizer is ... else tokenizer
        complete(DraftTargetPair(pair().target, pair().draft, given), texts, **options)

    return misuse


def in_shards() -> None:
    """As FSDP marks what it has spread."""
    target, draft = (tiny(**SMALL) for _ in range(2))
    draft._is_fsdp_managed_module = True
    with mock.patch("hf_specx.engine.ranks.world_size", return_value=2):
        complete(DraftTargetPair(target, draft, pair().tokenizer), ["a"])


def not_found() -> None:
    with looking_for("org/none"):
        raise OSError("no route")


def checked(*verifications: str, **settings: object):
    names = {"verifications": verifications} if verifications or not settings else {}
    return lambda: Settings(**names, **settings)


def subject(encodes: bool = False, prompts: object = ("a",), tokenizer: object = "reads"):
    target = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=encodes))
    return lambda: subject_of(SimpleNamespace(target=target, tokenizer=tokenizer), prompts, Settings())


def reported(path: str):
    return lambda: check_can_write(path)


def in_place_of_a_folder() -> None:
    with mock.patch.object(Path, "is_dir", return_value=True):
        check_can_write("report.html")


TARGET, DRAFT = ModelSource("org/target"), ModelSource("org/draft")
PLAIN = [
    ("no metric is called .bleu.; choose among acceptance, ", lambda: path("bleu")),
    ("'qwen9' is no folder here, no id on the Hub, which has an owner", lambda: known_card("qwen9")),
    # Drafts that are tried
    ("drafts=.'a', 'a'.: give at least one, and each once", lambda: tune("target", ["a", "a"], Study())),
    (
        "2 revisions were given for 1 drafts; give one for each",
        lambda: tune("target", ["a"], Study(), draft_revisions=["v1", "v2"]),
    ),
    ("batches=.0.: give batch sizes of 1 or more", lambda: Study(batches=[0])),
    ("repeats=0 is no number of timed runs; give 1", lambda: Study(repeats=0)),
    ("'org/none' cannot be got from the Hub, and there is no folder of that name here: no route", not_found),
    (
        "'a' has no tokenizer, so it cannot read",
        lambda: encode_batches("a", Loaded(tiny(), None, TARGET), Study(prompts=["a"])),
    ),
    # Another server
    (
        "draft is in the subfolder 'small' of 'org/draft', where vLLM does not look; save",
        exported(TARGET, ModelSource("org/draft", subfolder="small")),
    ),
    (
        "the target is an encoder-decoder .AutoModelForSeq2SeqLM., which vLLM does not serve",
        exported(ModelSource("org/target", auto_class="AutoModelForSeq2SeqLM"), DRAFT),
    ),
    (
        "the draft 'org/my-dflash' has 'dflash' in its name, .*rename or move it",
        exported(TARGET, ModelSource("org/my-dflash")),
    ),
    (
        "the target scores 5 tokens and the draft 4; .*save the pair with draft='reference'",
        exported(ModelSource("org/target", vocab_size=5), ModelSource(vocab_size=4)),
    ),
    # Placement, and many texts
    ("='balanced' spreads the draft over devices", placed(draft_device_map="balanced")),
    ("cache_tokens=-1 is no number of tokens; give", placed(cache_tokens=-1)),
    ("texts='def' is not a list of strings; put", completed("def")),
    ("batch_size=0 is no number of rows; give 1", completed(batch_size=0)),
    ("seed=-1 is outside of what a torch gen.*give an int", completed(seed=-1)),
    ("seeds= belongs to one call of generate; leave", completed(seeds=[1])),
    ("ordered= belongs to strategy.generate_many; leave", completed(ordered=True)),
    ("out='.*/tool_cases.py' is there already, and .*; name another", lambda: check_results_path(Path(__file__))),
    ("there is no folder .*/no; make it, or name", lambda: check_results_path(Path("no/done.jsonl"))),
    ("out='/dev/null' is a device; name a file", lambda: check_results_path(Path("/dev/null"))),
    ("the pair has no tokenizer to read texts with", completed(tokenizer=None)),
    ("the models are spread over processes", in_shards),
    ("prompt 1 is empty, and the tokenizer puts nothing", completed(["a", ""])),
    # The bench; more in `tests/cli/test_cli_bench.py` and `tests/bench`
    ("'block' is unknown; give plain", lambda: way("block")),
    ("is there already and has no results .*; name", lambda: read_cells(Path(__file__), "schema")),
    # A check
    ("verifications=.'greedy', 'magic'.: give some of", checked("greedy", "magic")),
    ("new_tokens=1 and samples=None leave nothing .* give 2", checked(new_tokens=1)),
    ("num_draft_tokens='auto': give a number", checked(num_draft_tokens="auto")),
    ("temperature=0 is not above 0; give a positive number, or decode greedily", checked(temperature=0)),
    (r"top_p=2 is not in \(0, 1\]; give a number above 0", checked(top_p=2)),
    ("top_k=-1 is negative; give 0, which keeps", checked(top_k=-1)),
    ("level=1 is no chance of a false alarm; give", checked(level=1)),
    ("do_sample= is set by the check", checked(options={"do_sample": True})),
    ("eos_token_id: give plain values", checked(options={"eos_token_id": object()})),
    ("the pair is of encoder-decoders, .*; compare", subject(encodes=True)),
    ("prompts='def': give a list of texts", subject(prompts="def")),
    ("no tokenizer to read prompts with; DraftT.* gives it one", subject(tokenizer=None)),
    ("there is no folder .*/no", lambda: read_cells(Path("no/check.json"), "check")),
    ("is no interrupted check .*; name", lambda: read_cells(Path(__file__), "check")),
    ("report.pdf does not end in .html, .*; name", reported("report.pdf")),
    ("report.html is a folder; name a file in it", in_place_of_a_folder),
    ("there is no folder .*/no; make it, or name", reported("no/report.html")),
]
