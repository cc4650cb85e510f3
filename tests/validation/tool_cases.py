"""Misuse of what measures, checks, places, shares, describes and exports pairs; as in `misuse_cases`."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from repositories import SMALL, pair
from tiny import tiny

from hf_specx.equivalence.checks import check_report, check_subject
from hf_specx.equivalence.settings import Settings
from hf_specx.hub.cards import known_card
from hf_specx.hub.vllm import vllm
from hf_specx.measure.checks import (
    check_cell,
    check_drafts,
    check_grid,
    check_out,
    check_store,
    check_study,
    looking_for,
    plots_without_matplotlib,
    prompts_without_tokenizer,
)
from hf_specx.measure.contenders import way
from hf_specx.measure.grafted import Recipe
from hf_specx.measure.grid import results
from hf_specx.measure.inputs import BenchPair, load_bench_pair
from hf_specx.measure.store import Store
from hf_specx.metrics import path
from hf_specx.pair_files.pair_config import ModelSource, PairConfig
from hf_specx.pairs.complete import complete
from hf_specx.pairs.placement import plan


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
    with mock.patch("hf_specx.engine.ranks.world_size", return_value=2):
        complete(SimpleNamespace(target=target, draft=draft, tokenizer=pair().tokenizer, generate=None), ["a"])


def not_found() -> None:
    with looking_for("org/none"):
        raise OSError("no route")


def benched(tokenizer: object = ..., encodes: bool = False, **settings: object):
    """A pair that is loaded for the bench, and its inputs."""
    known = tiny(**SMALL)
    config = SimpleNamespace(is_encoder_decoder=encodes)
    target = SimpleNamespace(config=config, num_parameters=known.num_parameters)
    tokenizer = pair().tokenizer if tokenizer is ... else tokenizer
    found = SimpleNamespace(target=target, draft=target, tokenizer=tokenizer, prompts=[])
    return lambda: load_bench_pair("org/pair", "auto", [], lambda name, dtype: found)


def grid(*grids: str, given: tuple[str, ...] = (), only: tuple[str, ...] = (), accelerated: bool = True):
    return lambda: check_grid(list(grids), list(given), list(only), ["speed", "auto"], accelerated)


def recipe(draft_layers: int = 1, kv_heads: int = 2):
    return lambda: Recipe(64, 96, 4, draft_layers, 4, kv_heads, 100)


def full_of(prompt_tokens: int):
    return lambda: BenchPair("org/pair", tiny(), tiny(), {}).inputs(1, prompt_tokens, 8, 0)


def checked(*verifications: str, **settings: object):
    names = {"verifications": verifications} if verifications or not settings else {}
    return lambda: Settings(**names, **settings)


def subject(lacking: tuple = (), encodes: bool = False, prompts: object = ("a",), tokenizer: object = ...):
    return lambda: check_subject(lacking, encodes, prompts, tokenizer)


def reported(path: str, figures: str = "report_files", missing: Sequence[str] = ()):
    return lambda: check_report(Path(path), Path(figures), missing)


def in_place_of_a_folder() -> None:
    with mock.patch.object(Path, "is_dir", return_value=True):
        reported("report.html")()


def in_a_locked_folder() -> None:
    with mock.patch("os.access", return_value=False):
        reported("report.html")()


TARGET, DRAFT = ModelSource("org/target"), ModelSource("org/draft")
CASES = {
    "metric_of_no_such_name": ("no metric is called .bleu.; choose among acceptance, ", lambda: path("bleu")),
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
    "prompts_without_tokenizer": (
        "'a' has no tokenizer, so it cannot read",
        lambda: prompts_without_tokenizer("a", None),
    ),
    "server_without_subfolders": (
        "draft is in the subfolder 'small' of 'org/draft', and vLLM loads roots only; save",
        exported(TARGET, ModelSource("org/draft", subfolder="small")),
    ),
    "server_without_subfolders, inside": (
        "of .org/pair., and vLLM loads roots only; download",
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
    "draft_of_no_layers": ("draft_layers=0 is not between 0 and the 4 .*; give", recipe(draft_layers=0)),
    "draft_of_no_layers, all": ("draft_layers=4 is not between", recipe(draft_layers=4)),
    "heads_that_do_not_divide": ("4 heads and 3 key-value heads do not .* must be a multiple", recipe(kv_heads=3)),
    "contender_of_no_kind": ("'block' is unknown; give plain", lambda: way("block")),
    "contender_of_no_kind, greedy": ("'greedy-5' is unknown; give", lambda: way("greedy-5")),
    "pair_without_prompts": ("'org/pair' has no prompts of its own; give some with --file", benched()),
    "pair_without_prompts, tokenizer": ("has no tokenizer, so it cannot read any", benched(tokenizer=None)),
    "encoder_decoder_in_turns": ("'org/pair' is of encoder-decoders, .*; specx generate", benched(encodes=True)),
    "no_room_for_prompts": ("125 prompt tokens and 8 new ones are more than the 128 .*; give fewer", full_of(125)),
    "grafted_pair_of_no_recipe": (
        "'grafted-3B' is unknown; choose one of grafted-30M,",
        lambda: load_bench_pair("grafted-3B", "auto", [], pair),
    ),
    "file_of_another_kind": ("is there already and has no results .*; name", lambda: results(Path(__file__))),
    "plots_without_matplotlib": ("figures need matplotlib: pip install", lambda: plots_without_matplotlib(False)),
    "options_with_a_grid": (
        "--grid has its own .*leave PAIR, --batch out",
        grid("--grid", given=("PAIR", "--batch")),
    ),
    "two_grids": ("--grid and --full are two grids; choose", grid("--grid", "--full")),
    "grid_without_accelerator": ("--full has .*there is no GPU here; use --grid", grid("--full", accelerated=False)),
    "experiments_that_are_unknown": ("--only x is unknown; choose among speed, auto", grid("--grid", only=("x",))),
    "experiments_that_are_unknown, no grid": ("use it with --grid or --full", grid(only=("speed",))),
    "sizes_of_nothing": ("--prompt-tokens 0 and .* leave no round to time; give", lambda: check_cell(0, 8, 1, 1)),
    "sizes_of_nothing, new": ("--new-tokens 1 leave no", lambda: check_cell(5, 1, 1, 1)),
    "warpers_out_of_range": ("--temperature -1 and .*: give a temperature of 0", lambda: check_cell(5, 8, -1, 1)),
    "warpers_out_of_range, top-p": ("--top-p 0: give .* a top-p above 0", lambda: check_cell(5, 8, 1, 0)),
    "file_in_no_folder": ("there is no folder .*/no; make it", lambda: check_out(Path("no/results.json"))),
    "text_without_tokens": ("prompt 1 is empty, and the tokenizer puts nothing", completed(["a", ""])),
    "verifications_that_are_unknown": ("verifications=.'greedy', 'magic'.: give some of", checked("greedy", "magic")),
    "verifications_that_are_unknown, none": ("verifications=..: give", checked()),
    "verifications_that_are_unknown, twice": ("each once", checked("token", "token")),
    "texts_without_a_round": ("new_tokens=1 and samples=None leave nothing .* give 2", checked(new_tokens=1)),
    "texts_without_a_round, samples": ("samples=1 leave nothing", checked(samples=1)),
    "candidates_of_no_number": ("num_draft_tokens='auto': give a number", checked(num_draft_tokens="auto")),
    "candidates_of_no_number, none": ("num_draft_tokens=0: give", checked(num_draft_tokens=0)),
    "sampling_of_no_distribution": ("temperature=0, .*: give a temperature above 0", checked(temperature=0)),
    "sampling_of_no_distribution, top-p": ("top_p=2, .*: give", checked(top_p=2)),
    "sampling_of_no_distribution, top-k": ("top_k=-1: give", checked(top_k=-1)),
    "level_of_no_test": ("level=1 is no chance of a false alarm; give", checked(level=1)),
    "options_that_are_the_checks_own": ("do_sample= is set by the check", checked(options={"do_sample": True})),
    "options_that_are_no_values": ("eos_token_id: give plain values", checked(options={"eos_token_id": object()})),
    "metrics_without_evaluate": ("needs evaluate, scipy: pip install", subject(lacking=("evaluate", "scipy"))),
    "encoder_decoder_in_a_check": ("the pair is of encoder-decoders, .*; compare", subject(encodes=True)),
    "prompts_of_no_kind": ("prompts='def': give a list of texts", subject(prompts="def")),
    "prompts_of_no_kind, none": ("give a list of texts; the pair has none", subject(prompts=[])),
    "prompts_of_no_kind, tokenizer": (
        "no tokenizer to read prompts with; DraftT.* gives it one",
        subject(tokenizer=None),
    ),
    "file_in_no_folder, check": ("there is no folder .*/no", lambda: check_store(Path("no/check.json"), "check")),
    "name_of_a_folder": ("is a folder; name a file", lambda: check_store(Path(__file__).parent, "check")),
    "file_of_another_kind, check": ("is no interrupted check .*; name", lambda: Store(Path(__file__), "check", {})),
    "report_that_is_no_page": ("report.pdf does not end in .html, .*; name", reported("report.pdf")),
    "name_of_a_folder, report": ("report.html is a folder; name a file in it", in_place_of_a_folder),
    "file_in_no_folder, report": ("there is no folder .*/no; make it, or name", reported("no/report.html")),
    "report_that_cannot_be_written": ("report.html is not yours to write; name", in_a_locked_folder),
    "figures_that_are_no_folder": (
        "go into .*/tool_cases.py, which is a file; move it",
        reported("report.html", figures=__file__),
    ),
    "report_without_plots": (
        'needs jinja2: pip install "hf_specx.plots."',
        reported("report.html", missing=["jinja2"]),
    ),
}
