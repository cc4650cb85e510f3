"""What `specx generate` does once torch is imported: texts on the terminal or into a file, and the demo.

Texts go to standard output, all else to standard error.
"""

import copy
import importlib
import itertools
import json
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specx.bench.inputs import Inputs, emitted, encode, generation_settings, prompt_width
from hf_specx.bench.store import provenance
from hf_specx.bench.timer import Comparison, Timing, compare
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import same_tokens
from hf_specx.common.wrappers import label_of, vocabulary
from hf_specx.engine.report import SpeculationReport
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder, is_embedded
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.sampling.grammars import MAKE_MATCHERS, full_name
from hf_specx.sampling.rewindable import PerCallProcessor, RewindableProcessor
from hf_specx.sampling.thinking import GrammarAfter, ThinkingBudget

from .coloured import LEGEND, OriginStreamer, TokenDecoder, coloured, written_out
from .console import SPEEDUP_COLUMNS, Output, figure, steps, waiting_for
from .loading import say_what_runs, texts_for, texts_of
from .prompts import Prompt, Prompts, WithFields


DEMO_BATCHES = (1, 8)
DEMO_COLUMNS = ("", "batch", "tokens/s", *SPEEDUP_COLUMNS)
EMBEDDED_FIRST = 1  # of the prompts of the pair in the package: the one whose text is shown, which reads well
NEXT = "Two models of your own: specx tune TARGET DRAFT --prompts FILE, or specx generate --target T --draft D."
THINK, END_THINK = "<think>", "</think>"


class JsonGrammar(PerCallProcessor):
    """The grammar of a JSON schema as a logits processor that serves any number of calls; one of xgrammar serves one.

    Attributes:
        fingerprint: the schema, so that a file of texts goes on with the same one only.
    """

    def __init__(self, processor: Any, schema: str):
        self.processor, self.fingerprint = processor, schema

    def for_call(self, input_ids: torch.Tensor, vocab_size: int) -> RewindableProcessor:
        return MAKE_MATCHERS[full_name(self.processor)](self.processor, len(input_ids), vocab_size)


def processors_of(pair: DraftTargetPair, thinking_budget: int | None, schema: Path | None) -> list[Any]:
    """The logits processors for a thinking budget and a JSON schema, each None if there is none.

    Raises:
        ValueError: if the tokenizer has no tags of thinking, or the schema cannot be read.
    """
    processors: list[Any] = [] if thinking_budget is None else [budget_of(thinking_budget, pair)]
    if schema is not None:
        grammar = json_grammar(schema, pair)
        processors += [GrammarAfter(grammar.processor, budget.end) for budget in processors] or [grammar]
    return processors


def budget_of(tokens: int, pair: DraftTargetPair) -> ThinkingBudget:
    """The budget of --thinking-budget; raise ValueError if the tokenizer has no tags of thinking."""
    tokenizer = pair.tokenizer
    assert tokenizer is not None
    missing = [tag for tag in (THINK, END_THINK) if tag not in tokenizer.get_vocab()]
    require(
        not missing,
        f"--thinking-budget {tokens}: the target's tokenizer has no {' and no '.join(missing)}; leave the option out, "
        "or pass a ThinkingBudget with this model's own tags in Python.",
    )
    return ThinkingBudget(tokens, start=THINK, end=END_THINK, tokenizer=tokenizer)


def json_grammar(file: Path, pair: DraftTargetPair) -> JsonGrammar:
    """The grammar of a JSON schema in a file; raise ValueError if xgrammar cannot read it."""
    xgrammar = importlib.import_module("xgrammar")
    processor = importlib.import_module("xgrammar.contrib.hf").LogitsProcessor
    size = vocabulary(pair.target)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=size))
    schema = file.read_text(encoding="utf-8-sig")
    try:
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--json-schema {file} is no JSON schema that xgrammar can read: {error}") from error
    return JsonGrammar(processor(grammar), schema)


class Session:
    """What `specx generate` runs: a pair, options of its strategy, and arguments of `generate`.

    `facts` and the values that methods return are printed by --json.

    Arguments that are left out come from the target's generation config.
    """

    def __init__(
        self,
        pair: DraftTargetPair,
        name: str,
        strategy: dict[str, Any],
        options: dict[str, Any],
        processors: list[Any],
        template_options: dict[str, Any],
        seed: int,
        quiet: bool,
    ):
        self.pair, self.name, self.seed = pair, name, seed
        self.template_options = template_options
        self.texts, self.console = Output(quiet=quiet), Output(stderr=True, quiet=quiet)
        for option, value in strategy.items():
            setattr(pair.strategy, option, value)
        settings = generation_settings(pair.target, options)
        masks = {"logits_processor": processors} if processors else {}
        self.typed_options = options | {"max_new_tokens": settings["max_new_tokens"]} | masks
        self.options = settings | masks
        say_what_runs(pair, settings | {"seed": seed} | strategy)
        self.facts = {"pair": name, "seed": seed, "options": settings, **provenance(pair.target)}

    def answer(self, prompts: Iterable[Prompt], repeats: int) -> dict[str, Any]:
        """Generate for one batch, print what came of it, and compare it with plain `generate` in so many turns."""
        values, inputs = self.generate_and_show(texts_of(prompts, self.pair.tokenizer, self.template_options))
        if not repeats:
            return values
        comparison = self.compare(inputs, repeats)
        self.console.text(f"\n{comparison}")
        return values | {"comparison": comparison.to_dict()}

    def show_prompt(self, prompt: str) -> None:
        """Print a prompt on a new line, on which the text goes on."""
        self.console.print(Text(f"\n{written_out(prompt)}", "dim"), end="", soft_wrap=True)

    def draft_model(self) -> PreTrainedModel | None:
        """A draft model for assisted generation: the pair's own, or that of the package for its pair; else None."""
        pair = self.pair
        if not same_tokens(pair.tokenizer, pair.draft_tokenizer):
            return None
        draft: PreTrainedModel | None = next(iter(pair.models[1:]), None)
        if draft is None and is_embedded(self.name):  # its draft is a head, which transformers does not take
            draft = AutoModelForCausalLM.from_pretrained(
                embedded_folder() / DRAFT_MODEL, dtype=pair.target.dtype, device_map={"": pair.target.device}
            )
        return draft

    @property
    def for_stops(self) -> dict[str, Any]:
        """The tokenizer for a call of `generate` with stop strings."""
        return {"tokenizer": self.pair.tokenizer} if "stop_strings" in self.options else {}

    def compare(self, inputs: Inputs, repeats: int, draft: PreTrainedModel | None = None) -> Comparison:
        """Time plain `generate` and ours in turns; with a draft also assisted generation and ours with that draft."""
        num_methods = 2 if draft is None else 3 + (draft is not self.pair.draft)
        with steps("all in turns", num_methods * (repeats + 1)) as bar:
            strategy = self.pair.strategy
            options = self.options | self.for_stops
            return compare(self.pair.target, strategy, [inputs], options, repeats, self.seed, bar.update, draft)

    def generate(self, prompts: list[str], **more: Any) -> tuple[Inputs, torch.Tensor]:
        """The inputs of `generate` for a batch, and its output from the seed; `more` are other arguments."""
        target, tokenizer = self.pair.target, self.pair.tokenizer
        assert tokenizer is not None
        inputs = encode(tokenizer, target, prompts, self.options["max_new_tokens"])
        more |= self.for_stops
        torch.manual_seed(self.seed)
        return inputs, target.generate(**inputs, **self.options, **more)  # type: ignore[operator]

    def generate_and_show(self, prompts: list[str], show: bool = True) -> tuple[dict[str, Any], Inputs]:
        """Generate for a batch and print text and report; returns these as JSON has them, and the inputs."""
        target, tokenizer = self.pair.target, self.pair.tokenizer
        strategy = copy.copy(self.pair.strategy)
        assert tokenizer is not None
        if show and self.texts.color_system is not None and not self.texts.no_color:
            self.console.text(LEGEND)
        streams = len(prompts) == 1 and show and not self.texts.quiet
        if streams:
            show_prompt = partial(self.show_prompt, prompts[0])
            strategy.streamer = OriginStreamer(strategy, tokenizer, self.texts, show_prompt)
            strategy.stream_by = "run"
        with nullcontext() if streams else waiting_for(f"generating, batch {len(prompts)}"):
            inputs, output = self.generate(prompts, custom_generate=strategy)
        report = strategy.report
        assert report is not None
        ids = emitted(target, inputs, output, self.options)
        if show and not streams:
            for row, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
                prompt_ids = output[row, : prompt_width(target, inputs)].tolist()
                self.show_prompt(f"{row + 1}. {prompt}")
                self.texts.text(coloured(tokens, report.history[row], TokenDecoder(tokenizer, prompt_ids)))
        if show:
            self.console.text(f"\n{report}")
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        values = {"batch": len(prompts), "prompts": prompts, "texts": texts, "report": report.to_dict()}
        return values | {"comparison": None}, inputs


def write_texts(session: Session, prompts: Prompts, out: Path, batch_size: int) -> dict[str, Any]:
    """Complete prompts to a file, and say so; the same command goes on with one that was interrupted.

    "refused" prompts have a line in it without a text.
    """
    session.pair.report = None
    objects = WithFields(prompts)
    options = session.typed_options | {"chat_template_kwargs": session.template_options}
    session.pair.complete(objects, out=out, batch_size=batch_size, seed=session.seed, **options)
    with out.open(encoding="utf-8") as lines:
        refused = sum("error" in json.loads(line) for line in lines)
    rest = f"; refused prompts: {refused} of {len(prompts)}, and their lines say why" if refused else ""
    report: SpeculationReport | None = session.pair.report  # of this run alone, which may have found all done
    if report is not None:
        session.console.text(speed_of(report))
    written = len(prompts) - refused
    session.console.text(f"{written} {'text is' if written == 1 else 'texts are'} in {out}{rest}")
    facts = {"out": str(out), "prompts": len(prompts), "refused": refused}
    return facts | {"report": None if report is None else report.to_dict()}


def speed_of(report: SpeculationReport) -> str:
    """How fast a run was, and what was accepted, in one line."""
    seconds = report.seconds.get("total", 0.0)
    line = f"{report.emitted} tokens in {seconds:.1f} s"
    if seconds:
        line += f", {report.emitted / seconds:.0f} tokens/s"
    if report.judged:
        line += f", α {report.alpha:.2f}, {report.acceptance_rate:.0%} of candidates accepted, "
        line += f"{report.tokens_per_round:.2f} tokens a row and round"
    return line


def show_demo(session: Session, repeats: int) -> list[dict[str, Any]]:
    """Generate for one prompt and show that plain generate gives the same, then time all methods at batch 1 and 8."""
    console, prompts = session.console, texts_for(session.pair, [], session.name)
    first = EMBEDDED_FIRST if is_embedded(session.name) else 0
    runs, comparisons, draft = [], {}, session.draft_model()
    for size in DEMO_BATCHES:
        batch = list(itertools.islice(itertools.cycle(prompts), first, first + size))
        values, inputs = session.generate_and_show(batch, show=size == 1)
        if size == 1:
            console.text(f"\n{same_text(session, batch)}\n")
        comparisons[size] = session.compare(inputs, repeats, draft)
        runs.append(values | {"comparison": comparisons[size].to_dict()})
    labels = labels_of(draft, session.pair.draft)
    rows = [
        (label, str(size), *figures_of(getattr(comparison, method), comparison.plain))
        for size, comparison in comparisons.items()
        for method, label in labels.items()
    ]
    console.figures(DEMO_COLUMNS, rows)
    speedups = " and ".join(
        f"{comparison.ours.measured_speedup(comparison.plain):.2f} times at batch {size}"
        for size, comparison in comparisons.items()
    )
    medians = f"(medians of {repeats} turns), with the same distribution of texts"
    console.text(f"\nHere {labels['ours']} was {speedups} as fast as plain generate {medians}.", "bold")
    console.text("\n".join(f"{name}: {meaning}" for name, meaning in SPEEDUP_COLUMNS.items()), "dim")
    console.text(NEXT)
    return runs


def labels_of(draft: PreTrainedModel | None, pair_draft: Any) -> dict[str, str]:
    """The labels of the demo's rows, by attribute of `Comparison`: "ours" has the pair's draft, the others `draft`."""
    labels = {"plain": "plain generate"}
    if draft is not None:
        labels["assisted"] = f"assisted generation with {draft_label(draft)}"
    if draft is not None and draft is not pair_draft:
        labels["ours_with_its_draft"] = f"speculative sampling with {draft_label(draft)}"
    return labels | {"ours": f"speculative sampling with {draft_label(pair_draft)}"}


def figures_of(timing: Timing | None, plain: Timing) -> tuple[str, ...]:
    """Tokens per second and the speed-ups of a row of the demo; assisted generation does not take every call."""
    if timing is None:
        return ("does not take it", "-", "-", "-")
    return (
        f"{timing.tokens_per_second:.0f}",
        figure(timing.measured_speedup(plain)),
        figure(timing.median_of("forward_limited_speedup")),
        figure(timing.median_of("expected_speedup")),
    )


def draft_label(draft: Any) -> str:
    """The label of a draft in the demo: its kind and size, or how it drafts."""
    if not isinstance(draft, PreTrainedModel):
        return label_of(draft)
    return f"a {'model' if draft.can_generate() else 'head'} of {draft.num_parameters() / 1e6:.1f}M"


def same_text(session: Session, prompts: list[str]) -> str:
    """A sentence that says whether plain generate and ours gave one text: greedily, or from one seed."""
    coupled = copy.copy(session.pair.strategy)
    coupled.verification = "coupled"
    _, plain = session.generate(prompts)
    _, ours = session.generate(prompts, custom_generate=coupled)
    method = "Greedy speculative decoding"
    if session.options["do_sample"]:
        method = f'From seed {session.seed}, verification="coupled"'
    verdict = "different texts (which rounding can do in half precision)"
    if plain.tolist() == ours.tolist():
        verdict = "the same text, token by token"
    return f"{method} and plain generate gave {verdict}."
