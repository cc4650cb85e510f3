"""`specx bench`: time methods to generate in turns on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.bench.bench_settings import BenchSettings
from hf_specx.bench.checks import check_runs
from hf_specx.bench.decoding_methods import AFTER_KINDS, KINDS, parse_method
from hf_specx.hub.folders import check_out
from hf_specx.hub.locks import check_free

from .console import SPEEDUP_COLUMNS, Output, figure, imports, steps
from .options import (
    Batches,
    DecodingOptions,
    LoadingOptions,
    PairOptions,
    ProcessorOptions,
    PromptOptions,
    Seed,
    command,
    typed,
)
from .prompts import prompts_of_file


COLUMNS = {  # with what is in them
    "method": "",
    "tokens/s": "all rows together, the median over turns",
    "first token": "milliseconds until it comes, the median over turns",
    "between tokens": "milliseconds for each token of the longest row after its first, the median over turns",
    "accepted": "α, the chance that a candidate is accepted",
    "tokens a round": "of each row",
    **SPEEDUP_COLUMNS,
    "speed-up": f"{SPEEDUP_COLUMNS['speed-up']}, the median over turns (the least to the largest)",
}
HELP_METHOD = (
    "What to time, once for each: plain, plain-compiled, assisted, assisted-5, assisted:2, lookup-10, block-auto, "
    "token-5, coupled-5-compiled, coupled-4-tree-16, suffix-auto, several-auto, exit:2-auto, ...; else what fits this "
    "pair, beside plain and assisted generation."
)
HELP_OUT = "File that results are added to, as JSON; results of other settings stay in it."
HELP_IGNORE_EOS = "Do not end texts at end tokens: each has --max-new-tokens, so that equal lengths are compared."
HELP_PROMPT_TOKENS = (
    "Length to which prompts are joined and cut; else 64, or whole prompts with --prompts or --dataset."
)
GREEDILY = "block, token, coupled: greedily they are one, since nothing is drawn that could be judged"
PROMPT_TOKENS = 64  # of the pair's own prompts
SAMPLED = {"do_sample": True, "top_k": 0}  # without prompts of the user's, for a target whose config is greedy
MAX_NEW_TOKENS = 64  # where neither the call nor the model says how many


@command
def bench(
    named: PairOptions,
    source: PromptOptions,
    sampling: DecodingOptions,
    processing: ProcessorOptions,
    loading: LoadingOptions,
    batch_size: Batches = None,
    prompt_tokens: Annotated[int | None, typer.Option(help=HELP_PROMPT_TOKENS, min=1)] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "--contender", help=HELP_METHOD, show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help=HELP_IGNORE_EOS)] = False,
    repeats: Annotated[int, typer.Option(help="Timed runs of each method.")] = 3,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP_OUT)] = None,
) -> None:
    """Time plain, assisted and speculative generation in turns, each turn on other prompts.

    Without options it takes one or two minutes, on the pair in the package. Without --prompts text is sampled.
    """
    sizes, methods, generate_options = batch_size or [1, 8], tuple(method or ()), processing.beside(sampling)
    check_runs(sizes, repeats)
    for name in methods:
        parse_method(name)
    options: dict[str, Any] = {
        "max_new_tokens": MAX_NEW_TOKENS,
        **generate_options,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "prompt_tokens": prompt_tokens or (0 if source.is_named else PROMPT_TOKENS),
        "repeats": repeats,
        "dtype": loading.dtype,
        "quantize": loading.quantize,
    }
    all_settings = [BenchSettings(named.name, methods, size, **options) for size in sizes]
    check_out(out)
    prompts = prompts_of_file(source)
    with imports():
        from hf_specx.bench.inputs import generation_settings
        from hf_specx.bench.run_bench import run_bench, usual_methods
        from hf_specx.bench.store import Store, read_records

        from .loading import load_named, say_what_runs, texts_for
        from .setting_sources import naming_files
    read_records(out, "schema")  # raises for another file
    check_free(out)
    pair = load_named(named, loading, source.chat)
    pair.config.prompts = texts_for(pair, prompts, named.name, source.template_options)
    with naming_files(pair, generate_options):
        generation = generation_settings(pair.target, generate_options, MAX_NEW_TOKENS)
        if not source.is_named and "do_sample" not in generate_options and not generation["do_sample"]:
            generation = generation_settings(pair.target, SAMPLED | generate_options, MAX_NEW_TOKENS)
        all_settings = [replace(settings, **generation) for settings in all_settings]
        say_what_runs(pair, generation)
        names = methods or usual_methods(pair, generation["do_sample"])
        num_runs = (1 + repeats) * len(all_settings) * len(names)
        with Store(out, "schema", {}) as store, steps("methods in turns", num_runs) as bar:
            for settings in all_settings:
                store.add(run_bench(settings, pair, typed(), bar.update))
    new_records = store.records[-len(all_settings) :]
    show(dict(zip(all_settings, new_records, strict=True)), names, generation["do_sample"])


def show(records: dict[BenchSettings, dict[str, Any]], names: tuple[str, ...], do_sample: bool) -> None:
    """Print a table for each batch size, and what the names of methods and columns mean."""
    console = Output()
    for settings, results in records.items():
        console.text(f"\n{settings}", "bold")
        console.figures(list(COLUMNS), rows_of(results["methods"]))
        console.text(basis_of(results), "dim")
        for name, values in results["methods"].items():
            if "unavailable" in values:
                console.text(f"{name} did not run: {values['unavailable']}", "yellow")
    kinds = {parse_method(name).kind for name in names}
    meanings = {kind: meaning for kind, meaning in KINDS.items() if kind in kinds} | COLUMNS
    legend = ["", *(f"{name}: {meaning}" for name, meaning in meanings.items() if meaning), AFTER_KINDS]
    if not do_sample:
        legend.append(GREEDILY)
    console.text("\n".join(legend), "dim")


def rows_of(methods: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table, with the columns of `COLUMNS`; a method that could not run has no figures."""
    rows: list[tuple[str, ...]] = []
    for name, values in methods.items():
        rate = values.get("tokens_per_second")
        rows.append(
            (
                name,
                "-" if rate is None else f"{rate['median']:.0f}",
                milliseconds(values.get("latency", {}).get("first_token")),
                milliseconds(values.get("latency", {}).get("between_tokens")),
                figure(values.get("alpha") or None),  # that of no candidates is 0
                figure(values.get("tokens_per_round") or None),
                figure_with_range(values.get("speedup")),
                figure(values.get("forward_limited_speedup") or None),
                figure(values.get("expected_speedup") or None),
            )
        )
    return rows


def basis_of(results: dict[str, Any]) -> str:
    """In a line, what figures were made on, as others need it to compare with them; the file has all of it."""
    prompts, where, settings = results["prompts"], results["provenance"], results["settings"]
    tokens = prompts["tokens"]
    lengths = f"{tokens['min']:g}" if tokens["min"] == tokens["max"] else f"{tokens['min']:g} to {tokens['max']:g}"
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "hf_specx"))
    return (
        f"{prompts['count']} prompts of {lengths} tokens (digest {prompts['digest'][:12]}), {settings['repeats']} "
        f"turns from seed {settings['seed']}, {where['dtype']} on {where['device']}, "
        f"{versions}"
    )


def milliseconds(values: dict[str, float] | None) -> str:
    """The median of a `spread` of seconds, in milliseconds; "-" where it is not known."""
    return "-" if values is None else f"{1e3 * values['median']:.1f}"


def figure_with_range(values: dict[str, float] | None) -> str:
    """The median of turns, and the least and the largest of them."""
    if values is None:
        return "-"
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"
