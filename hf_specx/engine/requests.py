"""Requests, each prepared by `generate` as in a batch of one, and what becomes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria
from transformers.modeling_outputs import BaseModelOutput

from hf_specx.common.chats import chat_text, check_template_options, is_chat, token_ids
from hf_specx.common.devices import execution_device
from hf_specx.common.errors import brief, is_int, require
from hf_specx.common.tokenizers import padded_rows
from hf_specx.common.wrappers import vocabulary
from hf_specx.models.prompts import PreparedInputs
from hf_specx.sampling.processors import LikeliestToken, Processor, can_look_ahead
from hf_specx.sampling.rewindable import TokenMasks, with_token_masks
from hf_specx.sampling.stopping import Stopping

from .check_inputs import MAX_SEED, check_encoder_positions, check_length, check_token_ids, text_width
from .entry import bind_stop_strings, prepared_inputs
from .reasons import adapts_rows, reasons_in_inputs, rope_limits, why_learned_prompt


NO_PROMPT = "input_ids={} is no prompt; give a list of token ids, one or more, as tokenizers do, or of messages."
MANY_TOKENS = 1 << 30  # a limit beyond any `min_new_tokens`, of which transformers would warn
CONFIG_FIELDS = frozenset(vars(GenerationConfig()))
OWN_FIELDS = ("max_new_tokens", "stop_strings", "logits_processor", "temperature", "top_p")  # of a request
NOT_OF_ROWS = """
    seeds streamer custom_generate synced_gpus assistant_model num_return_sequences num_beams return_dict_in_generate
    attention_mask past_key_values inputs_embeds
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Request:
    """One prompt for `SpeculativeDecoding.generate_many`.

    Attributes:
        input_ids: the prompt, [L] ints, without pads; None where it is a chat.
        max_new_tokens: its own limit; None is that of the call.
        seed: its text is that of a batch of one under `seeds=[seed]`. None draws one from the default generator; under
            "token" and "block" the text then depends on how many candidates "auto" drafts, which follows the batch.
        stop_strings: its own; None are those of the call. They need a tokenizer.
        logits_processor: its own, after those of the call; grammars of known libraries among them. One of yours that
            keeps state serves one request, which is decoded in a batch of its own; others set `stateless = True`.
        temperature, top_p: its own, where the call samples; None are those of the call.
        generate_kwargs: anything else that `generate` takes for one row: `do_sample`, `top_k`, `repetition_penalty`, a
            `generation_config`, which counts in place of all that the call says of generation; what the target reads
            beside tokens, as its processor gives it for one prompt (`pixel_values`, `input_features`). With tensors,
            or where it samples and the call does not, a request is decoded in a batch of its own.
        messages: a chat in place of `input_ids`, each message with its role and content; the tokenizer puts it into
            its template.
        chat_template_kwargs: what the template reads besides messages, as {"enable_thinking": False} or {"tools":
            [...]}.
        cancelled: called before the request begins and after each round; once it returns True the request ends with
            the tokens that it has. The `is_set` of a `threading.Event` is one.
    """

    input_ids: Sequence[int] | torch.Tensor | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop_strings: str | list[str] | None = None
    logits_processor: Sequence[LogitsProcessor] | None = None
    temperature: float | None = None
    top_p: float | None = None
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    cancelled: Callable[[], bool] | None = None

    def is_cancelled(self) -> bool:
        """Whether `cancelled` says so."""
        return self.cancelled is not None and self.cancelled()


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    Attributes:
        index: the number of the request, counted from 0.
        tokens: the new tokens, an end token among them; None of a request that was refused.
        finish_reason: "stop" at an end token or another stopping criterion, "length" at the limit, "cancelled", or
            "refused".
        logprobs: of each token, under the distribution after all processors; None unless asked for. Those of a greedy
            request in a call that samples are 0.0, since its processors leave one token.
        raw_logprobs: of each token, under the model's own distribution; None unless asked for.
        error: why the request was refused; None if it was not.
    """

    index: int
    tokens: list[int] | None
    finish_reason: str
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Piece:
    """What a request has got since its last piece: `generate_many(..., stream=True)`.

    Attributes:
        index: the number of the request, counted from 0.
        tokens: the new ones, an end token among them.
        finished: the `Completion` with all of its tokens, if that was the last piece; else None.
    """

    index: int
    tokens: list[int]
    finished: Completion | None = None


class CancelCriteria(StoppingCriteria):
    """Stops a row that is decoded alone once its request is cancelled."""

    stateless = True

    def __init__(self, cancelled: Callable[[], bool]):
        self.cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.cancelled(), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class PreparedRequest:
    """A request as `generate` prepared it for a batch of one.

    Attributes:
        request: as it was given; `options` are the arguments of `generate` for it.
        prompt_ids: [l], the tokens of the request; `input_ids` is the same, or what a decoder starts with.
        seed: its own if `has_own_seed`, else one that was drawn.
        processors: of the call and its own. `has_own_processors` says whether some may be its own: it brings some, or
            arguments of `generate`.
        row_processors: the same in a batch with others, with `TokenMasks` in place of those whose state can be taken
            back; a call of its own makes such masks itself.
        greedy: whether its processors leave the likeliest token alone, beside rows that sample.
        runs_alone: whether it is decoded in a batch of one, as any call: something of it keeps state, transformers
            decodes it, it reads more than tokens, or it samples where the call does not.
    """

    request: Request
    options: dict[str, Any]
    index: int
    prompt_ids: torch.Tensor
    input_ids: torch.Tensor
    seed: int
    has_own_seed: bool
    processors: Sequence[Processor]
    row_processors: Sequence[Processor]
    has_own_processors: bool
    stopping: Stopping
    greedy: bool
    runs_alone: bool

    @property
    def limit(self) -> int:
        """The most tokens that it may emit."""
        return self.stopping.max_new_tokens

    def is_cancelled(self) -> bool:
        """As of the request."""
        return self.request.is_cancelled()

    @property
    def width(self) -> int:
        """Tokens of its prompt, also one that an encoder reads."""
        return max(len(self.prompt_ids), len(self.input_ids))


class RequestPreparer:
    """Has `generate` prepare requests, each for a batch of one, and then batches of them, with the same options."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]):
        self.model, self.options = model, dict(options)
        self.tokenizer, self.device = self.options.pop("tokenizer", None), execution_device(model)
        self.make_stop = lru_cache(maxsize=8)(StopStringCriteria)  # each reads the whole vocabulary
        self._try_options()

    def _try_options(self) -> None:
        """Have `generate` prepare one token, so that it raises at once what it has against the options."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        # stop strings become criteria for each request, those of a config too
        options = self.options | {"stop_strings": None}
        if not options.keys() & {"max_new_tokens", "max_length", "generation_config"}:
            # each request may have its own limit
            options |= {"max_new_tokens": MANY_TOKENS, "cache_implementation": None}
        self.do_sample = bool(self._prepare_batch_of_one(token, options).generation_config.do_sample)

    def prepare_batch(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> PreparedInputs:
        """The inputs of several requests, [l] tokens each, with pads."""
        side = "right" if self.model.config.is_encoder_decoder else "left"
        padded = padded_rows(prompts, side)
        options = self.options | {"max_new_tokens": max_new_tokens, "stop_strings": None}
        return _inputs_from_generate(self.model, padded["input_ids"], padded["attention_mask"], options)

    def prepare_alone(self, request: PreparedRequest) -> PreparedInputs:
        """The inputs of a request that runs alone, with all that it gives."""
        ids = request.prompt_ids[None]
        options = request.options | {"max_new_tokens": request.limit}
        return _inputs_from_generate(self.model, ids, torch.ones_like(ids), options)

    def _request_options(self, request: Request) -> dict[str, Any]:
        """The arguments of `generate` for a request: those of the call, and its own."""
        options, own = self.options, dict(request.generate_kwargs)
        if "generation_config" in own:
            options = {name: value for name, value in options.items() if name not in CONFIG_FIELDS}
        overrides = {name: getattr(request, name) for name in OWN_FIELDS if name != "logits_processor"}
        options = options | own | {name: value for name, value in overrides.items() if value is not None}
        if request.logits_processor is not None:
            options["logits_processor"] = [*(options.get("logits_processor") or []), *request.logits_processor]
        return options

    def prepare_request(self, index: int, request: Request) -> PreparedRequest:
        """A request as `generate` prepares it for a batch of one.

        Raises:
            ValueError: if it cannot be served.
        """
        prompt_ids = self.read_prompt(request)
        _check(request, prompt_ids)
        check_token_ids(self.model, prompt_ids, self.model.config.is_encoder_decoder)
        prompt_ids = prompt_ids.to(self.device, torch.int64)
        options = self._request_options(request)
        bind_stop_strings(self.model, self.tokenizer, options, self.make_stop)
        prompt = self._prepare_batch_of_one(prompt_ids[None], options)
        samples = bool(prompt.generation_config.do_sample)
        reads_tensors = any(isinstance(value, torch.Tensor) for value in request.generate_kwargs.values())
        # greedy rows can stand in a batch that samples, and not the other way round
        is_unlike_others = reads_tensors or (samples and not self.do_sample)
        greedy = self.do_sample and not samples and not is_unlike_others
        if greedy:
            prompt.processors.append(LikeliestToken())
        with_masks = with_token_masks(prompt.processors, prompt.input_ids, vocabulary(self.model), prompt.stopping)
        runs_alone = self._must_run_alone(prompt, with_masks)
        if not runs_alone:
            for mask in _token_masks(with_masks):
                mask.begin(1)
        runs_alone = runs_alone or is_unlike_others
        seed = _seed_of(request, samples)
        check_length(prompt, prompt.stopping.max_new_tokens)
        if self.model.config.is_encoder_decoder:
            check_encoder_positions(self.model, len(prompt_ids))
        return PreparedRequest(
            request=request,
            options=options,
            index=index,
            prompt_ids=prompt_ids,
            input_ids=prompt.input_ids[0],
            seed=seed,
            has_own_seed=request.seed is not None,
            processors=prompt.processors,
            row_processors=with_masks,
            has_own_processors=request.logits_processor is not None or bool(request.generate_kwargs),
            stopping=prompt.stopping,
            greedy=greedy,
            runs_alone=runs_alone,
        )

    def check_kind(self, request: Request) -> None:
        """Raise a ValueError if tokens are of another type, or a chat has no template."""
        if request.messages is None:
            as_ids(request.input_ids)
            return
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        message = (
            "a request is a chat, which needs a tokenizer with a chat template; give one by tokenizer=, or give "
            "tokens."
        )
        require(has_template, message)

    def read_prompt(self, request: Request) -> torch.Tensor:
        """The prompt of a request, [L] ints; a chat in the tokenizer's template.

        Raises:
            ValueError: if it is none.
        """
        self.check_kind(request)
        messages, options = request.messages, request.chat_template_kwargs
        check_template_options(options, f"chat_template_kwargs={brief(options)}")
        if messages is None:
            require(not options, f"chat_template_kwargs={brief(options)} is for messages; give them, or leave it out.")
            return as_ids(request.input_ids)
        require(
            request.input_ids is None,
            f"the request has input_ids={brief(request.input_ids)} and messages; leave one of them out.",
        )
        require(is_chat(messages), f"messages={brief(messages)} is no list of messages, each with role and content.")
        return as_ids(token_ids(self.tokenizer, chat_text(self.tokenizer, messages, options)))

    def _prepare_batch_of_one(self, ids: torch.Tensor, options: dict[str, Any]) -> PreparedInputs:
        """As `_inputs_from_generate`, for ids [1, L] without pads."""
        if self.model.config.is_encoder_decoder:  # the encoder reads a batch; here only processors are prepared
            states = torch.zeros(*ids.shape, 1, dtype=self.model.dtype, device=ids.device)
            options = options | {"encoder_outputs": BaseModelOutput(states)}
        return _inputs_from_generate(self.model, ids, torch.ones_like(ids), options)

    def _must_run_alone(self, prompt: PreparedInputs, processors: Sequence[Processor]) -> bool:
        """Whether no other row may be beside a request: something of it keeps state, or it cannot be speculated.

        Raises:
            ValueError: if what keeps state was given for all requests.
        """
        stateful = [type(each).__name__ for each in processors if not can_look_ahead(each)]
        stateful += prompt.stopping.stateful
        stateful += [mask.name for mask in _token_masks(processors) if mask.shared is not None]
        self._check_shared(stateful)
        longest = text_width(prompt) + prompt.stopping.max_new_tokens
        changes_with_longest_row = any(longest > limit for _, limit in rope_limits(self.model))
        reasons = reasons_in_inputs(prompt, prompt.stopping.max_new_tokens)
        return bool(stateful or changes_with_longest_row or reasons)

    def _check_shared(self, stateful: list[str]) -> None:
        """Raise a ValueError if something with a state of its own was given for all requests."""
        remedies = {"logits_processor": "give each its own, to generate_many as Request(..., logits_processor=[...])"}
        remedies["stopping_criteria"] = "call generate for each"
        for name, remedy in remedies.items():
            for kind in (type(each).__name__ for each in self.options.get(name) or []):
                message = (
                    f"{kind} may keep state, and all requests would share it; {remedy}, or set its attribute "
                    "stateless = True if it keeps none."
                )
                require(kind not in stateful, message)


def as_request(prompt: Any) -> Request:
    """A request, or what was given in place of one: the tokens of a prompt, or a chat."""
    if isinstance(prompt, Request):
        return prompt
    return Request(messages=prompt) if is_chat(prompt) else Request(prompt)


def _token_masks(processors: Sequence[Processor]) -> list[TokenMasks]:
    return [each for each in processors if isinstance(each, TokenMasks)]


def _seed_of(request: Request, samples: bool) -> int:
    """The seed of a request: its own, or one that is drawn where it samples."""
    if request.seed is not None:
        return request.seed
    return int(torch.randint(MAX_SEED - 1, (), device="cpu")) if samples else 0


def as_ids(prompt: Any) -> torch.Tensor:
    """A prompt as a tensor [L] of integers; a ValueError if it is of another type."""
    try:
        dtype = None if len(prompt) else torch.int64
        ids = prompt if isinstance(prompt, torch.Tensor) else torch.as_tensor(prompt, dtype=dtype, device="cpu")
        ok = ids.ndim == 1 and not (ids.is_floating_point() or ids.dtype == torch.bool or ids.is_meta)
    except (TypeError, ValueError, RuntimeError):  # as torch says it of one thing or another
        ok = False
    require(ok, NO_PROMPT.format(brief(prompt)))
    return ids


def _check(request: Request, ids: torch.Tensor) -> None:
    """Raise a ValueError for what `generate` has errors of other kinds for."""
    limit, processors, seed = request.max_new_tokens, request.logits_processor, request.seed
    require(len(ids) > 0, NO_PROMPT.format(brief(request.input_ids)))
    message = f"max_new_tokens={brief(limit)} is no number of tokens; give an int of 1 or more, or None."
    require(limit is None or is_int(limit), message)
    message = f"logits_processor={brief(processors)} is no list of processors; put a single one into a list."
    is_list = isinstance(processors, Sequence) and all(map(callable, processors))
    require(processors is None or is_list, message)
    message = f"seed={seed!r} is no int from 0 to 2**63 - 1; give one, or leave it out."
    require(seed is None or (is_int(seed) and 0 <= seed < MAX_SEED), message)
    for name in request.generate_kwargs:
        message = f"generate_kwargs has {name}, which is of a call of generate and of no single row; leave it out."
        require(name not in NOT_OF_ROWS, message)
        message = f"generate_kwargs has {name}, and so has the request itself; leave one of them out."
        require(name not in OWN_FIELDS or getattr(request, name) is None, message)


def _inputs_from_generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
) -> PreparedInputs:
    """What `generate` would decode with for [B, L] ids; completions have no outputs but their tokens."""
    prompts: list[PreparedInputs] = []

    @wraps(prepared_inputs)
    def keep_prompt(*args: Any, **kwargs: Any) -> torch.Tensor:
        prompt = prepared_inputs(*args, **kwargs)  # of PEFT's wrapper it has the model inside
        why = why_learned_prompt(prompt.model)
        require(not why, f"{why}.")
        message = (
            f"num_beams={prompt.generation_config.num_beams} and "
            f"num_return_sequences={prompt.generation_config.num_return_sequences} make several rows of a request, "
            "which has one; leave them out, or call generate for each request."
        )
        require(len(prompt.input_ids) == len(ids), message)
        message = "PEFT's own generate alone knows where adapters begin (aLoRA); call it for each request."
        require(not adapts_rows(prompt.model), message)
        prompt.generation_config.return_dict_in_generate = False
        prompts.append(prompt)
        return prompt.input_ids

    model.generate(ids, attention_mask=mask, **options, custom_generate=keep_prompt)  # type: ignore[operator]
    return prompts[0]
