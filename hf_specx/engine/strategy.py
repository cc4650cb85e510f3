"""The strategy that users give to `generate`: its options, and what it remembers from call to call."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput

from hf_specx.common.devices import free_tokens
from hf_specx.common.errors import require
from hf_specx.common.round import Listener, Round
from hf_specx.common.tokenizers import same_tokens
from hf_specx.common.wrappers import ModelReference, NoModel, label_of, unwrapped, unwrapped_draft
from hf_specx.drafting.auto import TRIAL_SHARE
from hf_specx.drafting.candidates import AnyDraft, make_drafter
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.heads.draft_names import with_assistant_drafts, with_loaded_drafts, with_weightless_drafts
from hf_specx.drafting.other_tokenizer import MATCHES, match_tokenizers
from hf_specx.models.choose import LAYOUTS
from hf_specx.models.prompts import PreparedInputs, prepare

from .call import Call, make_call, warn_once
from .check_arguments import check_draft, check_entry, check_generate_many, repository_of
from .check_options import check_options
from .decode import decode
from .entry import prepared_inputs
from .generate_frame import CheckingSignature, withheld_arguments
from .measured_target import with_measured_target
from .plain import decode_plainly
from .queue import RequestQueue, in_order
from .reasons import DOES_NOT_PAY
from .report import SpeculationReport
from .requests import Request
from .run import Run


class SpeculativeDecoding(NoModel):
    """Speculative sampling for `model.generate(..., custom_generate=strategy)`.

    The strategy may serve many calls; it remembers costs and acceptance from one to the next. Calls in several threads
    may share it if they have the same target, no streamer, and no `CandidateGenerator` or `Drafter` of yours that
    serves one call at a time. `generate` takes one more argument: `seeds`, one int for each row (after
    `num_return_sequences`) in a list, range, tensor or array, makes each row independent of the others. What cannot be
    speculated exactly is decoded by transformers' own sampler, with a warning.

    Args:
        draft_model: a model, also wrapped by `torch.compile` or PEFT; a `CandidateGenerator` that reads text alone;
            `SuffixDraft`; `EarlyExitDraft`; `DraftHead`; `MtpDraft`; a `Drafter` of yours; the name or folder of a
            model or head, which the first call loads for its target; another name that `--draft` takes ("suffix",
            "exit:4", "head:NAME"); or a list of these with at most one that runs forwards: each row and round takes
            what promises more.
        num_draft_tokens: the number of candidates of each round. "auto" takes the number from 0 to 20 with the most
            expected tokens per second, by the acceptance seen so far and by what forwards cost, estimated by the sizes
            of models and later measured. It is 5 for a `CandidateGenerator`, and for a `Drafter` without `cost` or
            `max_candidates`. An int wins over `num_assistant_tokens` of the call or of the draft; "auto" gives way to
            it. 0 is plain.
        verification: "block", "token", or "coupled", which gives the tokens that plain `generate` samples under the
            same `torch.manual_seed`, or for a row with a seed under that. None is "block", but "coupled" if candidates
            are not drawn from a distribution, as those of a `CandidateGenerator` or `SuffixDraft`, or rows with seeds
            advance together. With `do_sample=False` the verifier is greedy whatever this says.
        layout: how rows of unequal length share a batch: "ragged", "padded", "packed" or "lockstep"; "auto" takes the
            best one that was shown to be exact for the architecture.
        tree: the most candidates of a row in a round where several may follow one token, of which the text takes the
            branch that is the target's own; False has each follow the one before. `num_draft_tokens` is then how many
            follow one another. Sampled text is that of "coupled" verification.
        compile: whether to compile the forwards after the prompts, for fixed sizes of batch, text and query (in graphs
            on CUDA). The first call of each size takes seconds longer. An x86 CPU keeps linear weights twice.
        streamer: gets the prompt and then the tokens as they are emitted; for more than one row a `BatchStreamer`.
        stream_by: "token", one at a time as in `generate`, or "run", all that a round emitted.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding, or altogether; otherwise they must be equally large.
        tokenizer_match: "auto" refuses a draft with another tokenizer if less than half of the tokens of a sample text
            are in both, "tokens" if none is.
        costs: of an earlier strategy (`strategy.costs`), so that this one drafts the same numbers. From then on both
            learn from the calls of either; `costs.copy()` is a copy.

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        costs: what "auto" goes by; empty again when the strategy is used with another target.
        listeners: objects with a method `observe`, which is given the `Round` of each round.

    Raises:
        ValueError: if an option is unknown, unsupported or contradicts another.

    Example:
        >>> strategy = SpeculativeDecoding(draft_model)
        >>> model.generate(**inputs, do_sample=True, max_new_tokens=128, custom_generate=strategy)
    """

    def __init__(
        self,
        draft_model: AnyDraft | str | Path | Sequence[AnyDraft | str | Path],
        *misplaced: Any,
        num_draft_tokens: str | int = "auto",
        verification: str | None = None,
        layout: str = "auto",
        tree: str | bool | int = False,
        compile: bool = False,
        streamer: BaseStreamer | None = None,
        stream_by: str = "token",
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer_match: str = "auto",
        costs: Costs | None = None,
        **unknown: Any,
    ):
        self.draft_model: Any = unwrapped_draft(with_weightless_drafts(draft_model))
        self.num_draft_tokens, self.verification, self.layout = num_draft_tokens, verification, layout
        self.tree = tree
        self.compile, self.streamer, self.stream_by = compile, streamer, stream_by
        self.tokenizer, self.draft_tokenizer, self.tokenizer_match = tokenizer, draft_tokenizer, tokenizer_match
        options = {name: value for name, value in vars(self).items() if name != "draft_model"} | {"costs": costs}
        choices = {"layout": LAYOUTS, "tokenizer_match": MATCHES, "stream_by": ("token", "run")}
        check_options(options, unknown, len(misplaced), choices)
        check_draft(self.draft_model)
        self.costs = costs if costs is not None else Costs()
        self.report: SpeculationReport | None = None
        self.listeners: tuple[Listener, ...] = ()
        self._warned: set[str] = set()  # shared with the copies that a pair makes of its strategy
        self._last_target: ModelReference | None = None

    def __repr__(self) -> str:
        description = label_of(self.draft_model)
        for name in ("num_draft_tokens", "verification", "layout", "tree", "compile"):
            description += f", {name}={getattr(self, name)!r}"
        return f"SpeculativeDecoding({description})"

    __signature__ = CheckingSignature()

    def __call__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> torch.Tensor | ModelOutput:
        """What `generate` calls after its preparations; a ValueError before any forward if it cannot be done exactly.

        An output with `return_dict_in_generate=True` has the report as its attribute `speculation_report`.
        """
        return self.decode(prepared_inputs(model, *args, **kwargs), **withheld_arguments())

    @torch.no_grad()
    def decode(
        self,
        prompt: PreparedInputs,
        earlier: SpeculationReport | None = None,
        streamer: BaseStreamer | None = None,
        **withheld: Any,
    ) -> torch.Tensor | ModelOutput:
        """The output of a call that `generate` has prepared.

        Args:
            prompt: what `generate` has prepared.
            earlier: a report that this call's goes on from.
            streamer: of `generate`, which has given it the prompt already; None takes the strategy's own.
            **withheld: other arguments of `make_call` that `generate` keeps to itself.
        """
        withheld["prompt_streamed"] = streamer is not None
        withheld["streamer"] = self.streamer if streamer is None else streamer
        try:
            return self.run_call(self.prepare_call(prompt, **withheld), earlier)
        finally:
            if withheld["streamer"] is not None:
                withheld["streamer"].end()

    def generate_many(
        self,
        model: PreTrainedModel,
        requests: Iterable[Request | Sequence[int] | Sequence[dict[str, Any]] | torch.Tensor | None],
        *,
        batch_size: int = 8,
        ordered: bool = False,
        logprobs: bool = False,
        stream: bool = False,
        max_batch_tokens: int | None = None,
        **generate_kwargs: Any,
    ) -> Iterator[Any]:
        """Complete any number of prompts; a row that ends makes place for the next one.

        Up to rounding each has the tokens of a batch of one under its seed; under "coupled" those of plain `generate`.

        Args:
            model: the target. In the ragged layout rows are filled again; others take whole batches.
            requests: lists of token ids without pads, chats as lists of messages (for the tokenizer's template), or
                `Request`; taken one by one as places become free. A None says that there is nothing yet: rows go on,
                and it is asked again after the next round. Where no row goes on it is asked at once, and may wait.
            ordered: whether completions come in the order of the requests, rather than as they are done.
            logprobs: whether completions carry log-probabilities of their tokens.
            stream: whether tokens come as soon as they are there, as `Piece`; those of a request that is decoded in a
                batch of its own come at its end.
            max_batch_tokens: the most slots of the target's cache: rows times the longest row with its limit; compiled
                forwards round up. By default what half of the device's free memory holds.

        Returns:
            An iterator of `Completion`, or of `Piece`. A request that cannot be served, or whose own processors
            exclude every token, gets a completion with an error, and the others go on. A call that cannot be done
            exactly raises a ValueError before any forward, an error of `requests` after what came before it.

        Example:
            >>> for done in strategy.generate_many(model, tokenizer(prompts).input_ids, max_new_tokens=128):
            ...     print(done.index, tokenizer.decode(done.tokens))
        """
        model = unwrapped(model)
        require(not (ordered and stream), "ordered=True is of whole completions, stream=True of parts; leave one out.")
        check_generate_many(model, requests, batch_size, max_batch_tokens, self.streamer, generate_kwargs)
        drafter, options = self._make_drafter(model), {"tokenizer": self.tokenizer} | generate_kwargs
        models = [model] if drafter.model is None else [model, drafter.model]
        most = max_batch_tokens or free_tokens(models)
        queue = RequestQueue(models, requests, options, most, logprobs, stream)
        completions = self._completions(queue, batch_size)
        return in_order(completions) if ordered else completions

    @torch.no_grad()
    def _completions(self, queue: RequestQueue, batch_size: int) -> Iterator[Any]:
        """The completion of each request, as soon as it is done; pieces, if the queue streams.

        Requests take the places of rows that ended as long as they fit beside the others. Where the next one does not,
        or the layout refills no rows, the batch is completed first, and another one begins.
        """
        earlier: SpeculationReport | None = None
        while queue.begin_batch(batch_size) or not queue.is_over:
            if not queue.batch_requests:
                yield from queue.results.pop()
                continue
            if queue.batch_requests[0].runs_alone:
                self._decode_alone(queue, earlier)
            else:
                call, target = with_measured_target(self.prepare_call(queue.batch_inputs(), queue))
                if call.fallback_reason:  # which transformers' own sampler has no queue for
                    queue.run_each_alone()
                    continue
                run = Run(call, self.costs, target)
                for _ in self._run_rounds(run, earlier):
                    yield from queue.results.pop()
                    run.end_phase("handing on")
            earlier = self.report
            yield from queue.results.pop()
        yield from queue.results.pop()
        if queue.iterable_error is not None:
            raise queue.iterable_error

    def _decode_alone(self, queue: RequestQueue, earlier: SpeculationReport | None) -> None:
        """Decode a request that runs alone, as any call; refuse it if its own processors fail."""
        (request,), inputs = queue.batch_requests, queue.batch_inputs()
        try:
            queue.results.complete_alone(request, self.run_call(self.prepare_call(inputs), earlier))
        except (ValueError, RuntimeError) as error:
            if not queue.is_request_error(error):
                raise
            queue.results.refuse(request.index, error)
            self.report = earlier

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """A context in which `model.generate` is speculative, for code that cannot pass `custom_generate=`.

        Example:
            >>> with strategy.attached(model):
            ...     trainer.train()
        """
        check_entry(model := unwrapped(model))
        attributes = vars(model)
        before = {"generate": attributes["generate"]} if "generate" in attributes else {}
        plain = partial(type(model).generate, model)  # type: ignore[attr-defined]
        attributes["generate"] = update_wrapper(partial(self._generate, model), plain)  # some ask for its arguments
        try:
            yield model
        finally:
            del attributes["generate"]
            attributes.update(before)

    def _generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` returns inside of `attached`; without a strategy where code of the Hub decodes."""
        repository = repository_of(model, *args[1:2], **kwargs)
        if not repository:
            return type(model).generate(model, *args, **{"custom_generate": self} | kwargs)
        if repository not in self._warned:
            self._warned.add(repository)
            message = (
                f"{repository} of the Hub decodes this call, as its generation config asks, without any speed-up: "
                "leave penalty_alpha, dola_layers and the like out."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        return type(model).generate(model, *args, **kwargs)

    def load(self, target: PreTrainedModel) -> None:
        """Load drafts that were given by name, for this target."""
        parts = self.draft_model if isinstance(self.draft_model, list) else [self.draft_model]
        if any(isinstance(part, str | Path) for part in parts):
            self.draft_model = with_loaded_drafts(self.draft_model, target)
            check_draft(self.draft_model)

    def _make_drafter(self, target: PreTrainedModel) -> Drafter:
        """The drafter of one call with a target; a draft that is a model with another tokenizer is matched to it."""
        self.load(target)
        draft = with_assistant_drafts(self.draft_model)
        tokenizer, draft_tokenizer = self.tokenizer, self.draft_tokenizer
        if tokenizer is not None and draft_tokenizer is not None and not same_tokens(tokenizer, draft_tokenizer):
            draft = match_tokenizers(draft, target, tokenizer, draft_tokenizer, self.tokenizer_match)
        return make_drafter(draft, target)

    def prepare_call(
        self, prompt: PreparedInputs, queue: RequestQueue | None = None, streamer: Any = None, **withheld: Any
    ) -> Call:
        """A call of `generate`, or a batch of a queue, as `make_call` decides and checks it."""
        drafter = self._make_drafter(prompt.model)
        strategy = copy.copy(self)  # as it is now: its options may change while the call goes on
        strategy.streamer = streamer
        call = make_call(strategy, prompt, drafter, queue, **withheld)
        self.reset_costs_for(prompt.model)
        self.costs.candidates_per_step = drafter.candidates_per_step
        return call

    def reset_costs_for(self, model: PreTrainedModel) -> None:
        """Forget costs if the last call had another target."""
        model = unwrapped(model, adapters=True)
        if self._last_target is not None and self._last_target() is not model:
            self.costs = Costs()
        self._last_target = ModelReference(model)

    def run_call(self, call: Call, earlier: SpeculationReport | None) -> torch.Tensor | ModelOutput:
        """The output of a call, decoded to its end; the report goes on from an earlier one."""
        if not call.fallback_reason and call.would_not_draft(self.costs):
            call = replace(call, fallback_reason=DOES_NOT_PAY)
        call, target = with_measured_target(call)
        if not call.fallback_reason:
            run = Run(call, self.costs, target)
            for _ in self._run_rounds(run, earlier):
                pass
            return run.output()
        warn_once(call, self.layout, self._warned)
        output, report = decode_plainly(call)
        if call.fallback_reason == DOES_NOT_PAY:
            self.costs.trial_budget += TRIAL_SHARE * report.plain_steps
        self.report = report = report if earlier is None else earlier + report
        if call.prompt.generation_config.return_dict_in_generate:
            output.speculation_report = report
        return output

    def _run_rounds(self, run: Run, earlier: SpeculationReport | None) -> Iterator[Round]:
        """The rounds of a call while it is decoded; the report goes on from an earlier one."""
        warn_once(run.call, self.layout, self._warned)
        self.report = run.report
        yield from decode(run)
        self.report = run.report = run.report if earlier is None else earlier + run.report

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time forwards of `model` and the draft after [B, L] ids of any meaning, and put the times into `costs`."""
        model = unwrapped(model)
        inputs = {"inputs": input_ids, "attention_mask": torch.ones_like(input_ids)}
        prompt = replace(prepare(model, 1, inputs), inputs_tensor=input_ids)
        Run(self.prepare_call(prompt), self.costs).calibrate()
