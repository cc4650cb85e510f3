"""What `specx generate` does for each batch: text coloured by origin, a report, and the speed."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from hf_specx.bench.inputs import Inputs, emitted, encode, prompt_width
from hf_specx.bench.store import provenance
from hf_specx.bench.timer import Comparison, compare
from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import require
from hf_specx.pairs.pair import DraftTargetPair

from .coloured import OriginStreamer, TokenDecoder, coloured, legend, written_out
from .complete import write_texts
from .console import Output, lines_now_and_then, progress
from .demo import show_demo
from .loading import load_named, texts_of
from .options import LARGEST_SEED, Named
from .prompts import FilePrompts, Prompts


class NewProcessor(list[Any]):
    """A list of one processor, made anew whenever it is read, since a processor of xgrammar serves one call.

    Args:
        make: makes it.
        schema: that it keeps to, and is told from others by; a file of texts is of one alone.
    """

    def __init__(self, make: Callable[[], Any], schema: str):
        super().__init__([None])
        self.make, self.fingerprint = make, schema

    def __iter__(self) -> Iterator[Any]:
        return iter([self.make()])


def json_grammar(file: Path, pair: DraftTargetPair) -> NewProcessor:
    """The `logits_processor` argument of `generate` for a JSON schema.

    Raises:
        ValueError: xgrammar cannot read the schema.
    """
    xgrammar = importlib.import_module("xgrammar")
    processor = importlib.import_module("xgrammar.contrib.hf").LogitsProcessor
    size = vocabulary(pair.target)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=size))
    schema = file.read_text(encoding="utf-8-sig")
    try:
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--json-schema {file} is no JSON schema that xgrammar can read: {error}") from error
    return NewProcessor(partial(processor, grammar), schema)


@dataclass
class Session:
    """What all batches of a command share.

    Attributes:
        name: what results and messages call the models.
        pair: with a tokenizer.
        options: for `generate`.
        repeats: timed runs of each contender; 0 for none.
        seed: of all random numbers.
        grammar: that each text follows, if any.
        quiet: whether nothing is printed.
    """

    name: str
    pair: DraftTargetPair
    options: dict[str, Any]
    repeats: int
    seed: int
    grammar: NewProcessor | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        self.console = Output(quiet=self.quiet)
        self.arguments = self.options | ({} if self.grammar is None else {"logits_processor": self.grammar})

    def answer(self, prompts: Prompts | FilePrompts, chat: bool, out: Path | None, batch_size: int) -> dict[str, Any]:
        """Generate for prompts, one batch, or any number to a file; returns the document of --json.

        Args:
            prompts: what to continue.
            chat: as in `texts_of`.
            out, batch_size: the file, and how many rows it is filled by at a time.
        """
        if out is not None:
            return write_texts(self, prompts, chat, out, batch_size)
        self.console.print(legend(), soft_wrap=True)
        run, inputs = self.run(texts_of(list(prompts), self.pair.tokenizer, chat, self.name))
        if self.repeats:
            run["comparison"] = self.compare(inputs).to_dict()
        return self.document([run])

    def demonstrate(self) -> dict[str, Any]:
        """The demo; returns the document of --json."""
        return self.document(show_demo(self))

    def document(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """What was generated and by what, as plain values."""
        source = {"pair": self.name, "seed": self.seed, "options": self.options, **provenance(self.pair.target)}
        return source | {"runs": runs}

    def generate(self, prompts: list[str], **how: Any) -> tuple[Inputs, torch.Tensor]:
        """What `generate` is given for a batch, and what it makes of it from the seed; `how` are more arguments."""
        target, tokenizer = self.pair.target, self.pair.tokenizer
        assert tokenizer is not None
        inputs = encode(tokenizer, target, prompts, self.options["max_new_tokens"])
        torch.manual_seed(self.seed)
        return inputs, target.generate(**inputs, **self.arguments, **how)  # type: ignore[operator]

    def run(self, prompts: list[str], show: bool = True) -> tuple[dict[str, Any], Inputs]:
        """Generate for a batch, and print text and report if they are to be shown.

        Returns:
            The same as plain values, and what `generate` was given.
        """
        target, tokenizer, strategy = self.pair.target, self.pair.tokenizer, self.pair.strategy
        assert tokenizer is not None
        console, alone = self.console if show else Output(quiet=True), len(prompts) == 1
        if alone:
            console.print(Text(f"\n{written_out(prompts[0])}", "dim"), end="", soft_wrap=True)
            strategy.streamer, strategy.stream_by = OriginStreamer(strategy, tokenizer, console), "run"
        seen = alone and not console.quiet
        with nullcontext() if seen else lines_now_and_then(lambda: f"generating, batch {len(prompts)}"):
            try:
                inputs, output = self.generate(prompts, custom_generate=strategy)
            finally:
                strategy.streamer, strategy.stream_by = None, "token"
        report, new = strategy.report, emitted(target, inputs, output, self.options)
        assert report is not None
        for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)) if not alone else ():
            read = output[row, : prompt_width(target, inputs)].tolist()
            body = coloured(tokens, report.history[row], TokenDecoder(tokenizer, read))
            console.print(Text.assemble((f"\n{row + 1}. {written_out(prompt)}", "dim"), body), soft_wrap=True)
        console.print(Text(f"\n{report}"), soft_wrap=True)
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        values = {"batch": len(prompts), "prompts": prompts, "texts": texts, "report": report.to_dict()}
        return values | {"comparison": None}, inputs

    def compare(self, inputs: Inputs) -> Comparison:
        """Time plain and speculative generation in turns, and print the comparison."""
        with progress("plain and speculative in turns", 2 * (self.repeats + 1)) as advance:
            comparison = compare(
                self.pair.target, self.pair.strategy, [inputs], self.arguments, self.repeats, self.seed, advance
            )
        self.console.print(Text(f"\n{comparison}"), soft_wrap=True)
        return comparison


def open_session(named: Named, chosen: dict[str, Any], schema: Path | None, seed: int | None, **how: Any) -> Session:
    """Load what a command names, for texts.

    Args:
        named: the models.
        chosen: options of the strategy.
        schema: a file with a JSON schema, if texts are to follow one.
        seed: None for a new one.
        **how: further attributes of `Session`.

    Raises:
        ValueError: the models cannot be loaded or cannot read text.
    """
    pair = load_named(named)
    require(pair.tokenizer is not None, f"{named.name!r} has no tokenizer, so it cannot read text.")
    for option, value in chosen.items():
        setattr(pair.strategy, option, value)
    seed = torch.seed() % LARGEST_SEED if seed is None else seed
    return Session(named.name, pair, seed=seed, grammar=None if schema is None else json_grammar(schema, pair), **how)
