"""`specx generate`: text coloured by origin, a report, and the speed compared with plain `generate`."""

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import require
from hf_specx.measure.inputs import Inputs, emitted, encode, prompt_width
from hf_specx.measure.store import provenance
from hf_specx.measure.timer import Comparison, compare
from hf_specx.pairs.pair import DraftTargetPair

from .complete import check_out_options, complete_prompts
from .console import OriginStreamer, TokenDecoder, coloured, errors_in_one_line, legend, progress
from .options import (
    LARGEST_SEED,
    AsJson,
    DraftKind,
    Dtype,
    Greedy,
    MaxNewTokens,
    Revision,
    Temperature,
    Token,
    TopK,
    TopP,
    Trust,
    hub_options,
    load_given_pair,
    sampling_options,
    strategy_options,
    with_draft,
)
from .prompts import PromptFile, given_prompts


DEMO_BATCHES = (1, 8)
OTHER_WAYS = "as arguments, with --file, on standard input, or use --demo"
HELP_OUT = (
    "Write the texts here, as JSON lines, instead of showing and timing them. After an interruption the same command "
    "goes on where it was; several at once share the prompts."
)
HELP_SEED = "Of all random numbers; else a new one. With --out prompt i has seed + i, and it is 0 if not given."


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, one batch.", show_default=False)] = None,
    file: PromptFile = None,
    demo: Annotated[bool, typer.Option("--demo", help="The pair's own prompts, at batch 1 and 8.")] = False,
    pair: Annotated[str, typer.Option(help="Id or folder of a draft-target pair.")] = "embedded",
    draft: DraftKind = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    greedy: Greedy = False,
    verification: Annotated[str | None, typer.Option(help="token, block or coupled; else the pair's.")] = None,
    num_draft_tokens: Annotated[str | None, typer.Option(help="A number or auto; else the pair's.")] = None,
    seed: Annotated[int | None, typer.Option(help=HELP_SEED, min=0, max=LARGEST_SEED)] = None,
    dtype: Dtype = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of plain and of speculative generation, odd.")] = 5,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that each text follows; needs xgrammar.")
    ] = None,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="No timing against plain generate.")] = False,
    out: Annotated[Path | None, typer.Option(help=HELP_OUT)] = None,
    batch_size: Annotated[int | None, typer.Option(help="With --out: rows of a batch, else 8.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Generate with a draft, show where each token came from, and time it against plain generate; or, with --out,
    complete any number of prompts to a file.

    Prompts come from the arguments, --file, --demo, or else standard input.
    """
    with errors_in_one_line():
        check_out_options(out, batch_size, demo)
        given = given_prompts(prompts or [], file, OTHER_WAYS, demo)
        odd = repeats >= 1 and repeats % 2 == 1
        require(odd, f"--repeats {repeats} has no middle run; give an odd number of 1 or more.")
        options = sampling_options(greedy, temperature, top_p, top_k, max_new_tokens)
        chosen = strategy_options(num_draft_tokens, verification)
        loaded = load_reading_pair(pair, dtype, hub_options(revision, token, trust_remote_code), chosen, draft)
        grammar = None if json_schema is None else json_grammar(json_schema, loaded)
        session = Session(loaded, options, 0 if no_compare else repeats, seed, grammar)
        if out is not None:
            done = complete_prompts(loaded, given, out, batch_size, seed, session.arguments)
        else:
            done = session.show(demo_batches(loaded.prompts, pair) if demo else [list(given)])
    if as_json:
        typer.echo(json.dumps({"pair": pair, "options": options, **provenance(loaded.target)} | done))


def load_reading_pair(
    name: str, dtype: str, hub: dict[str, Any], options: dict[str, Any], draft: str | None = None
) -> DraftTargetPair:
    """A pair with a tokenizer; `options` replace those of its strategy, and `draft` its draft, see `with_draft`.

    Raises:
        ValueError: the pair has no tokenizer.
    """
    pair = with_draft(load_given_pair(name, dtype, **hub), draft)
    require(pair.tokenizer is not None, f"the pair {name!r} has no tokenizer, so it cannot read text.")
    for option, value in options.items():
        setattr(pair.strategy, option, value)
    return pair


def demo_batches(prompts: list[str], pair: str) -> list[list[str]]:
    """A list of the pair's own prompts for each of `DEMO_BATCHES`, repeated where there are not enough."""
    require(bool(prompts), f"--demo: the pair {pair!r} has no prompts of its own; give some as arguments.")
    return [list(itertools.islice(itertools.cycle(prompts), size)) for size in DEMO_BATCHES]


class NewProcessor(list[Any]):
    """A list of one processor, made anew whenever it is read, since a processor of xgrammar serves one call.

    Args:
        make: makes it.
        schema: that it keeps to; texts that were made with another one are not mixed with ours.
    """

    def __init__(self, make: Callable[[], Any], schema: str):
        super().__init__([None])
        self.make, self.schema = make, schema

    def __iter__(self) -> Iterator[Any]:
        return iter([self.make()])


def json_grammar(file: Path, pair: DraftTargetPair) -> NewProcessor:
    """The `logits_processor` argument of `generate` for a JSON schema.

    Raises:
        ValueError: xgrammar is not installed, or cannot read the schema.
    """
    found = importlib.util.find_spec("xgrammar") is not None
    require(found, "--json-schema needs xgrammar, which is not installed; pip install xgrammar.")
    xgrammar = importlib.import_module("xgrammar")
    processor = importlib.import_module("xgrammar.contrib.hf").LogitsProcessor
    size = vocabulary(pair.target)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=size))
    schema = file.read_text()
    try:
        json.loads(schema)
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--json-schema {file} is no JSON schema that xgrammar can read: {error}") from error
    return NewProcessor(partial(processor, grammar), schema)


@dataclass
class Session:
    """What all batches of a command share.

    Attributes:
        options: for `generate`.
        repeats: timed runs of each contender; 0 for none.
        seed: of all random numbers; None for a new one.
        grammar: that each text follows, if any.
    """

    pair: DraftTargetPair
    options: dict[str, Any]
    repeats: int
    seed: int | None
    grammar: NewProcessor | None = None

    def __post_init__(self) -> None:
        self.console = Console()
        self.arguments = self.options | ({} if self.grammar is None else {"logits_processor": self.grammar})

    def show(self, batches: list[list[str]]) -> dict[str, Any]:
        """Run batches one after another; returns the seed and what became of each."""
        seed = torch.seed() % LARGEST_SEED if self.seed is None else self.seed
        self.console.print(legend(), soft_wrap=True)
        return {"seed": seed, "runs": [self.run(batch, seed) for batch in batches]}

    def run(self, prompts: list[str], seed: int) -> dict[str, Any]:
        """Generate for a batch, print text, report and comparison, and return the same as plain values."""
        target, tokenizer, strategy = self.pair.target, self.pair.tokenizer, self.pair.strategy
        assert tokenizer is not None
        inputs = encode(tokenizer, target, prompts, self.options["max_new_tokens"])
        if len(prompts) == 1:
            self.console.print(Text(f"\n{prompts[0]}", "dim"), end="", soft_wrap=True)
            strategy.streamer, strategy.stream_by = OriginStreamer(strategy, tokenizer, self.console), "run"
        torch.manual_seed(seed)
        output = target.generate(**inputs, **self.arguments, custom_generate=strategy)  # type: ignore[operator]
        report, strategy.streamer, strategy.stream_by = strategy.report, None, "token"
        assert report is not None
        new, width = emitted(target, inputs, output, self.options), prompt_width(target, inputs)
        if len(prompts) > 1:
            for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
                body = coloured(tokens, report.history[row], TokenDecoder(tokenizer, output[row, :width].tolist()))
                self.console.print(Text.assemble((f"\n{row + 1}. {prompt}", "dim"), body), soft_wrap=True)
        self.console.print(Text(f"\n{report}"), soft_wrap=True)
        comparison = self.compare(inputs, seed) if self.repeats else None
        return {
            "batch": len(prompts),
            "prompts": prompts,
            "texts": tokenizer.batch_decode(new, skip_special_tokens=True),
            "report": report.to_dict(),
            "comparison": None if comparison is None else comparison.to_dict(),
        }

    def compare(self, inputs: Inputs, seed: int) -> Comparison:
        """Time plain and speculative generation in turns, and print the comparison."""
        with progress("plain and speculative in turns", 2 * (self.repeats + 1)) as advance:
            comparison = compare(
                self.pair.target, self.pair.strategy, [inputs], self.arguments, self.repeats, seed, advance
            )
        self.console.print(Text(f"\n{comparison}"), soft_wrap=True)
        return comparison
