"""Measures whether a target gives the same logits for several tokens at once as for the same tokens one by one.

All speculation rests on that. The sweep of the tests has shown it for model types as transformers ships them. A model
that runs other code has `untested_traits` (see `foreign_code`), and is measured once for the `Conditions` of a call,
before its first candidates are judged.
"""

import copy
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_specx.common.architectures import LAYOUTS_OF, WINDOW_IN_CACHE
from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async

from .packed import PackedRunner
from .prompts import PreparedInputs, gather_input_rows, has_rows
from .runner import ModelRunner
from .slots import gather_cache_rows, keys_values_of, self_attention, with_cross_attention


STEPS = 4  # tokens that are fed one by one, after the first of which each depends on the cache
LIMIT = 1e-3  # total variation, in float32 and wider
HALF = 2.0**-11  # epsilon from which on precision is half
ROUNDING, WORST_ROUNDING = 4.0, 0.1  # in half precision: times the rounding that was measured, and at most
MAX_SHARPENING = 1e4  # flat logits are multiplied by so much at most
MATMUL = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}  # epsilon of products of float32
EPSILONS = 4  # of half precision: so much total variation rounding explains, whatever was measured
MAX_RESULTS = 64  # of a model; the oldest go first, since code that counts its calls is measured in each call


class Difference(NamedTuple):
    """The result of a measurement.

    Attributes:
        value: the largest total variation between the distributions of both ways of feeding a target.
        limit: how much of it rounding explains.
        error: why a target cannot be fed in this layout; empty if it can.
    """

    value: float
    limit: float
    error: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether both ways give one distribution."""
        return self.value <= self.limit

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"total variation {self.value:.2g}, of which rounding explains {self.limit:.2g}"


class Conditions(NamedTuple):
    """What a result holds for: under other conditions a target is measured again.

    Attributes:
        traits: of the target, see `untested_traits`.
        layout: how its rows share the batch.
        epsilon: of the coarsest numbers that it computes with, which says what rounding explains.
        modes: its device, and whether it is in training mode.
        several_rows: whether there are others in the batch.
        hidden_slots: whether some rows have pads or gaps, which masks must hide.
        inputs: names of what it is given beside token ids, such as images.
        length_class: for a model type that `common/architectures.py` does not list, the logarithm of the prompts'
            length, rounded down to powers of two: nothing is known of what it does behind longer texts. 0 for others.
        candidates: the largest number of candidates of a round.
        steps: tokens that are fed one by one.
    """

    traits: frozenset[Hashable]
    layout: str
    epsilon: float
    modes: tuple[Hashable, ...]
    several_rows: bool
    hidden_slots: bool
    inputs: frozenset[str]
    length_class: int
    candidates: int
    steps: int

    @property
    def hold_for_later_prompts(self) -> bool:
        """Whether they also hold when refills of any length replace some of these prompts."""
        return self.several_rows and self.hidden_slots and not self.length_class


RESULTS: WeakKeyDictionary[PreTrainedModel, dict[Conditions, Difference]] = WeakKeyDictionary()


def conditions_of(
    prompt: PreparedInputs, traits: frozenset[Hashable], layout: str, candidates: int, steps: int
) -> Conditions:
    """The conditions under which a target is about to compute these prompts."""
    model, rows = prompt.model, len(prompt.input_ids)
    mask = prompt.kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    several_dimensions = isinstance(mask, torch.Tensor) and mask.ndim != 2
    return Conditions(
        traits=traits,
        layout=layout,
        epsilon=_epsilon(model),
        modes=(str(model.device), model.training),
        several_rows=rows > 1,
        hidden_slots=mask is not None and (several_dimensions or not bool(mask.all())),
        inputs=frozenset(name for name, value in prompt.kwargs.items() if isinstance(value, torch.Tensor)),
        length_class=0 if model.config.model_type in LAYOUTS_OF else prompt.input_ids.shape[1].bit_length(),
        candidates=candidates,
        steps=steps,
    )


def remember(model: PreTrainedModel, conditions: Conditions, difference: Difference) -> None:
    """Keep a result as long as the model exists, and not more than `MAX_RESULTS` of it."""
    results = RESULTS.setdefault(model, {})
    results[conditions] = difference
    while len(results) > MAX_RESULTS:
        del results[next(iter(results))]


def tokens_of_a_round(model: PreTrainedModel) -> int | None:
    """The most tokens of a row that a forward may be fed, 0 if its rows share experts; None where there is no limit.

    Experts with a capacity leave out the tokens beyond it (Switch Transformers), or beyond a share of the tokens of
    all rows (NLLB-MoE), which a forward over one token of a row never reaches, or not at the same token.
    """
    share = getattr(model.config, "moe_eval_capacity_token_fraction", None)
    if share is not None:
        return None if share >= 1 else 0
    return getattr(model.config, "expert_capacity", None)


@torch.no_grad()
def compare(runner: ModelRunner, batch: Batch, output: Any, candidates: int, steps: int = STEPS) -> Difference:
    """Measure the difference between both ways of feeding, behind prompts that `runner` has just computed.

    First transformers' own steps: a few tokens one by one, on a copy of the cache, as plain `generate` feeds them.
    Then one forward of the runner over `candidates` + 1 tokens that end with these, or with one more in every other
    row, as of rows that have accepted different numbers. It begins within the prompts, whose last tokens are fed anew.
    The runner rolls all of it back with its next forward.

    Args:
        batch: the prompts, with nothing emitted.
        output: what the forward over the prompts gave.
        candidates: the largest number of candidates of a round, at least `steps`.
        steps: tokens that are fed one by one.

    Returns:
        The largest total variation over all rows and places that both have; flat distributions are sharpened until
        their logits have a standard deviation of 1, since a random model would hide any fault otherwise.
    """
    rows, home = len(batch.rows), batch.ids.device
    epsilon = _epsilon(runner.model)
    is_half = epsilon >= HALF
    plain = PlainSteps(runner, output)
    vocab_size = getattr(runner.model.get_input_embeddings(), "num_embeddings", None)  # may be less than scores
    logits, tokens = [runner.prompt_logits[:, 0]], []
    last_rows = torch.arange(rows, device=home)  # those that have the last step
    for number in range(steps):
        # another token in each step: of equal ones a fault of masks or positions may give equal scores
        tokens.append(_likely(logits[-1][:, :vocab_size], number))
        if number < steps - 1:
            logits.append(plain(tokens[-1]))
            continue
        before_last = copy.deepcopy(plain) if is_half else None
        if rows > 1:  # rows that end leave the batch: the others must not depend on them
            last_rows = plain.with_other_rows()
        logits.append(logits[-1].index_copy(0, last_rows, plain(tokens[-1][last_rows])))
    last_tokens = tokens[-1]
    tokens.append(_likely(logits[-2][:, :vocab_size], steps))
    del plain
    forward_logits, num_before = _preview(runner, batch, torch.stack(tokens, 1), candidates)
    # (row, position in the forward, number of the step) where single steps have given logits as well
    compared = []
    for row in range(rows):
        for position in range(forward_logits.shape[1]):
            step = num_before[row] + position + 1
            if 0 <= step < steps or (step == steps and row < len(last_rows)):
                compared.append((row, position, step))
    index, positions, counts = to_device_async(compared, home).unbind(1)
    value = _total_variation(forward_logits[index, positions], torch.stack(logits)[counts, index])
    if before_last is None:
        return Difference(value, LIMIT)
    limit = EPSILONS * epsilon
    if limit < value <= WORST_ROUNDING:  # only here does it matter what rounding is
        if rows == 1:
            last_rows = before_last.with_other_rows()
        last_logits = before_last(last_tokens if rows > 1 else last_tokens[last_rows])
        others = last_logits[last_rows] if rows > 1 else last_logits
        rounding = _total_variation(others, logits[-1][last_rows])
        limit = min(max(limit, ROUNDING * rounding), WORST_ROUNDING)
    return Difference(value, limit)


def _likely(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """[R], the token of this rank, from 0, by logits [R, V]; the last one of a smaller vocabulary."""
    return logits.topk(min(rank + 1, logits.shape[-1])).indices[:, -1]


def _preview(
    runner: ModelRunner, batch: Batch, tokens: torch.Tensor, candidates: int
) -> tuple[torch.Tensor, list[int]]:
    """The logits of one forward over `candidates` + 1 tokens, or fewer if prompts are short.

    Args:
        tokens: [R, n], the last of these; before them come the last tokens of the prompts.

    Returns:
        The logits [R, P, V], and for each row how many of `tokens` come before its first position; negative for a
        position within the prompt.
    """
    rows, number = tokens.shape
    shortest_prompt = min(state.prompt_length for state in batch.row_states)
    num_refed = min(candidates + 2 - number, shortest_prompt - 1)  # tokens of the prompts that are fed anew
    num_refed = num_refed if _can_feed_anew(runner, num_refed) else 0
    lead = 0 if runner.lockstep or rows == 1 else 1  # every other row is so many tokens further
    num_before = [row % 2 * lead - num_refed for row in range(rows)]
    batch.write(tokens)
    if lead and not num_refed:  # rows that are ahead need their first token in the cache
        runner.preview(batch, 1)
    count = min(candidates + 1, num_refed + number - lead)
    return runner.preview(batch.view_at(num_before), count), num_before


def _can_feed_anew(runner: ModelRunner, count: int) -> bool:
    """Whether the last `count` tokens of all prompts may be fed once more, as tokens that rows have emitted are."""
    config, kwargs = runner.model.config, runner.prompt.kwargs
    is_part = config.get_text_config(decoder=True) is not config  # prompts may hold more than tokens
    if runner.lockstep or is_part or config.is_encoder_decoder:
        return False
    if runner.gaps is not None or "token_type_ids" in kwargs:
        return False
    if config.model_type in WINDOW_IN_CACHE:
        return False
    positions = kwargs.get("position_ids")
    return count > 0 and (positions is None or bool((positions[..., -count - 1 :].diff() == 1).all()))


class PlainSteps:
    """Single steps of transformers' own `generate` behind prompts that a runner has read, on a copy of its cache."""

    def __init__(self, runner: ModelRunner, output: Any):
        self.model: Any = runner.model
        self.name, self.ids, self.rows = runner.cache_name, runner.prompt.input_ids, len(runner.prompt.input_ids)
        self.kwargs = dict(runner.prompt.kwargs)
        output = copy.copy(output)
        output[self.name] = as_transformers_cache(runner)
        self._update(output)

    def _update(self, output: Any) -> None:
        self.kwargs = self.model._update_model_kwargs_for_generation(
            output, self.kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] after one more token [R] of each row."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        inputs = self.model.prepare_inputs_for_generation(self.ids, next_sequence_length=1, **self.kwargs)
        output = self.model(**inputs, return_dict=True)
        self._update(output)
        return output.logits[:, -1].to(tokens.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlainSteps":
        """The model is the same, and so are tensors that no step writes to."""
        steps = copy.copy(self)
        steps.kwargs = self.kwargs | {self.name: copy.deepcopy(self.kwargs[self.name], memo)}
        return steps

    def with_other_rows(self) -> torch.Tensor:
        """Go on with the first half of the rows, or with a single row twice; returns their row indices."""
        index = torch.arange(-(-self.rows // 2), device=self.ids.device) if self.rows > 1 else self.ids.new_zeros(2)
        gather_cache_rows(self.kwargs[self.name], index)
        for name, value in self.kwargs.items():
            if name == "position_ids" and value is not None and value.shape[-2] == self.rows:
                self.kwargs[name] = value.index_select(-2, index.to(value.device))
            elif has_rows(value, self.rows) or name == "encoder_outputs":
                self.kwargs[name] = gather_input_rows(value, index, self.rows)
        self.ids, self.rows = self.ids[index], len(index)
        return index


def as_transformers_cache(runner: ModelRunner) -> Cache:
    """A copy of what a runner's cache holds of the prompts, as a cache of transformers' own."""
    if runner.lockstep:
        return copy.deepcopy(runner.cache)
    text_cache: Any = self_attention(runner.cache)
    cross_attention = [] if text_cache is runner.cache else keys_values_of(runner.cache.cross_attention_cache)
    cache = DynamicCache(config=runner.model.config.get_text_config(decoder=True))
    if isinstance(runner, PackedRunner):
        columns = [runner.row_keys_values(row, row) for row in range(len(runner.prompt.input_ids))]
        for number, layer_of_rows in enumerate(zip(*columns, strict=True)):
            keys, values = map(torch.stack, zip(*layer_of_rows, strict=True))
            cache.update(keys, values, number)
        return cache
    for number, layer in enumerate(text_cache.layers):
        if layer.is_initialized:  # else it shares the keys of another
            keys, values = layer.in_text_order()
            lacking = runner.width - keys.shape[2]  # what a window has lost nobody sees
            keys, values = (nn.functional.pad(x, (0, 0, lacking, 0)) for x in (keys, values))
            cache.update(keys, values, number)
    return with_cross_attention(cache, cross_attention)


def _epsilon(model: nn.Module) -> float:
    """The precision of the coarsest numbers that a model computes with; torch may multiply float32 in fewer bits.

    Floats of eight bits are how weights are stored, and nothing is computed in them alone.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtypes = {dtype for dtype in dtypes if dtype.itemsize > 1} or {torch.float32}
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    dtypes |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    products = MATMUL[torch.get_float32_matmul_precision()] if torch.float32 in dtypes else 0.0
    return max(products, *(torch.finfo(dtype).eps for dtype in dtypes))


def _total_variation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest over all rows of two sets of logits [..., V]; infinite where only one of them is a distribution."""
    logits, reference = logits.float(), reference.float()
    finite = reference.isfinite()
    centred = reference.masked_fill(~finite, 0)
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    mean = centred.sum(-1, keepdim=True) / count
    spread = ((centred - mean).masked_fill(~finite, 0).square().sum(-1, keepdim=True) / count).sqrt()
    sharper = (1 / spread).clamp(1, MAX_SHARPENING)
    p, q = (logits * sharper).softmax(-1), (reference * sharper).softmax(-1)
    undefined = p.isnan().all(-1) & q.isnan().all(-1)
    distance = (p - q).abs().sum(-1) / 2
    return float(distance.masked_fill(undefined, 0).nan_to_num(nan=float("inf")).max())
