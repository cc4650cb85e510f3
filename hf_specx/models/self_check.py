"""Whether feeding several tokens behind a cache gives what feeding them one by one gives, measured for one target.

All speculation rests on that. The sweep of the tests has shown it for model types as transformers ships them. What
runs other code is `unproven`, and measured once, before its first candidates count.
"""

import copy
import functools
import sys
import weakref
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx.common.architectures import LAYOUTS_OF, MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent

from .packed import PackedRunner
from .prompts import gather_input_rows, has_rows
from .runner import HiddenStates, ModelRunner
from .slots import columns_of, gather_cache_rows, self_attention, with_cross_attention


TRUSTED = ("torch", "transformers", "peft", "accelerate", "deepspeed")  # whose code the tests run in targets
UNTRIED = ("torch.ao",)  # but for these parts
STANDARD = sys.stdlib_module_names - {"__main__"}
PLAIN_TENSORS: tuple[type, ...] = (nn.Parameter, torch.Tensor, nn.Buffer)  # whose arithmetic is torch's own
DISTRIBUTED = "torch.distributed"  # where the sharded parameters of ranks come from
STEPS = 4  # tokens that are fed one by one, after the first of which each depends on the cache
LIMIT = 1e-3  # total variation, in float32 and wider
HALF = 2.0**-11  # epsilon from which on precision is half
ROUNDING, WORST_ROUNDING = 4.0, 0.1  # in half precision: times the rounding that was measured, and at most
SHARPEST = 1e4  # at most so many times are flat logits sharpened
MATMUL = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}  # epsilon of products of float32
EPSILONS = 4  # of half precision: so much total variation rounding explains, whatever was measured


class Trait(NamedTuple):
    """Something that a target runs and the tests do not, in words; and what it is, where others have these words."""

    words: str
    identity: Any = None


class Difference(NamedTuple):
    """The largest total variation between both ways of feeding a target, and how much of it rounding explains.

    `error` is that of a layout in which the target cannot be fed.
    """

    figure: float
    limit: float
    error: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether both ways give one distribution."""
        return self.figure <= self.limit

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"total variation {self.figure:.2g}, of which rounding explains {self.limit:.2g}"


NO_DIFFERENCE = Difference(0.0, 0.0)
# results for each target, by its traits and by the layout that was measured
RESULTS: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], Difference]] = WeakKeyDictionary()


def unproven(model: PreTrainedModel) -> frozenset[Trait]:
    """What a target runs that the tests have not shown to be right with several tokens at once; empty if nothing.

    These are a model type that is in no table, attention that the tests do not run, and in any module: code from
    outside of `TRUSTED` as its class, as its `forward`, as a hook on it, or as the arithmetic of its parameters. A
    hook that has the attribute `reads_only = True` changes nothing and is let through.
    """
    traits: set[Trait] = set()
    if model.config.model_type not in LAYOUTS_OF:
        traits.add(Trait(f"model type {model.config.model_type!r} is in no table of the tests"))
    for config in (model.config, model.config.get_text_config(decoder=True)):
        attention = str(config._attn_implementation)
        function = ALL_ATTENTION_FUNCTIONS.get(attention)
        is_replaced = function is not None and not hasattr(function, "uses") and _is_foreign(function)  # ours has uses
        if attention not in MASKED or is_replaced:
            traits.add(Trait(f"attn_implementation={attention!r} is not run by the tests", _identity(function)))
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        traits |= _foreign_hooks(hooks, "every module")
    kinds: set[type[nn.Module]] = set()
    for module in model.modules():  # there may be thousands, in each call
        kind, attributes = type(module), vars(module)
        if kind not in kinds:
            kinds.add(kind)
            traits |= _foreign_kind(kind)
        replaced = attributes.get("_old_forward") or attributes.get("forward")  # accelerate keeps what it wraps
        if replaced is not None and _is_foreign(replaced):
            traits.add(Trait(f"the forward of a {kind.__qualname__} is from elsewhere", _identity(replaced)))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if attributes[name]:
                traits |= _foreign_hooks(attributes[name], kind.__qualname__)
        for parameter in attributes["_parameters"].values():
            tensor = type(parameter)
            if tensor not in PLAIN_TENSORS and parameter is not None and not tensor.__module__.startswith(DISTRIBUTED):
                traits.add(Trait(f"{kind.__qualname__} has a {tensor.__qualname__} as a parameter"))
    return frozenset(traits)


def _foreign_kind(kind: Any) -> set[Trait]:
    """What is foreign in a class of modules."""
    if _is_foreign_class(kind):
        return {Trait(f"{kind.__qualname__} is a class of {kind.__module__}", weakref.ref(kind))}
    if _is_foreign(kind.forward):
        return {Trait(f"the forward of {kind.__qualname__} is from elsewhere", _identity(kind.forward))}
    return set()


def describe(traits: frozenset[Trait]) -> str:
    """Traits in words, the first two."""
    words = sorted({trait.words for trait in traits})
    description = " and ".join(words[:2])
    return description if len(words) <= 2 else f"{description} and {len(words) - 2} more"


def _foreign_hooks(hooks: dict[int, Any], where: str) -> set[Trait]:
    """Those of a module that may change what it gives; torch never gives the number of a hook to another one."""
    traits = set()
    for number, hook in hooks.copy().items():  # those of other threads come and go
        if not _is_harmless(hook):
            traits.add(Trait(f"a forward hook is on {where}", number))
    return traits


def tokens_of_a_round(model: PreTrainedModel) -> int | None:
    """The most tokens of a row that a forward may be fed, 0 if its rows share experts; None where there is no limit.

    Experts with a capacity leave out the tokens beyond it (Switch Transformers), or beyond a share of the tokens of
    all rows (NLLB-MoE), which a forward over one token of a row never reaches, or not at the same token.
    """
    share = getattr(model.config, "moe_eval_capacity_token_fraction", None)
    if share is not None:
        return None if share >= 1 else 0
    return getattr(model.config, "expert_capacity", None)


def _is_harmless(hook: Any) -> bool:
    """Whether a hook says that it only reads, is trusted, or is that of `HiddenStates`, of any copy of this file."""
    function = getattr(hook, "func", hook)
    if isinstance(function, MethodType) and type(function.__self__).__name__ == HiddenStates.__name__:
        return True
    return getattr(hook, "reads_only", getattr(_code_of(hook), "reads_only", False)) or not _is_foreign(hook)


def _code_of(called: Any) -> Any:
    """The function behind bound methods, partial ones, and what torch has compiled."""
    while isinstance(called, functools.partial | MethodType):
        called = called.func if isinstance(called, functools.partial) else called.__func__
    return getattr(called, "_torchdynamo_orig_callable", called)


def _identity(called: Any) -> Any:
    """What tells code from other code with the same name; it keeps no model alive."""
    code = _code_of(called)
    return weakref.ref(code if isinstance(code, FunctionType) else type(code))


def _is_foreign(called: Any) -> bool:
    """Whether something that is called, or what it wraps, is from outside of `TRUSTED`."""
    code = _code_of(called)
    kind: Any = type(code)
    return _is_foreign_function(code) if kind is FunctionType else _is_foreign_class(kind)


@functools.lru_cache(4096)
def _is_foreign_function(function: Any) -> bool:
    while function is not None:
        # where it was written: a decorator gives itself the `__module__` of what it wraps
        if not _is_trusted(getattr(function, "__globals__", {}).get("__name__") or str(function.__module__)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@functools.lru_cache(4096)
def _is_foreign_class(kind: Any) -> bool:
    return not all(_is_trusted(base.__module__) for base in kind.__mro__)


def _is_trusted(module: str) -> bool:
    root = module.partition(".")[0]
    return (root in TRUSTED and not module.startswith(UNTRIED)) or root in STANDARD


@torch.no_grad()
def compare(runner: ModelRunner, batch: Batch, output: Any, most: int, steps: int = STEPS) -> Difference:
    """The difference between both ways of feeding, for the prompts that `runner` has just read.

    First transformers' own steps: a few tokens one by one, on a copy of the cache, as plain `generate` feeds them.
    Then one forward of the runner over `most` + 1 tokens that end with these, or with one more in every other row, as
    of rows that have accepted different numbers. It begins within the prompts, whose last tokens are fed anew. The
    runner rolls all of it back with its next forward.

    Args:
        batch: the prompts, with nothing emitted.
        output: what the forward over the prompts gave.
        most: the largest number of candidates of a round, at least `steps`.
        steps: tokens that are fed one by one.

    Returns:
        The largest total variation over all rows and places that both have; flat distributions are sharpened until
        their logits have a standard deviation of 1, since a random model would hide any fault otherwise.
    """
    rows, home = len(batch.rows), batch.ids.device
    epsilon = _epsilon(runner.model)
    is_half, rounding = epsilon >= HALF, 0.0
    plain = PlainSteps(runner, output)
    vocab_size = getattr(runner.model.get_input_embeddings(), "num_embeddings", None)  # may be less than scores
    logits, tokens = [runner.prompt_logits[:, 0]], []
    last_rows = torch.arange(rows, device=home)  # those that have the last step
    for number in range(steps):
        # another token in each step: of equal ones a fault of masks or positions may give equal scores
        tokens.append(logits[-1][:, :vocab_size].topk(number + 1).indices[:, number])
        if number < steps - 1:
            logits.append(plain(tokens[-1]))
        elif is_half:
            others = copy.deepcopy(plain)
            logits.append(plain(tokens[-1]))
            index = others.with_other_rows()
            rounding = _total_variation(others(tokens[-1][index]), logits[-1][index])
        else:  # rows that end leave the batch: the others must not depend on them
            if rows > 1:
                last_rows = plain.with_other_rows()
            logits.append(logits[-1].index_copy(0, last_rows, plain(tokens[-1][last_rows])))
    tokens.append(logits[-2][:, :vocab_size].topk(steps + 1).indices[:, steps])
    del plain
    forward_logits, before = _preview(runner, batch, torch.stack(tokens, 1), most)
    # (row, position in the forward, tokens that were emitted up to there) of what single steps have given as well
    compared = []
    for row in range(rows):
        for position in range(forward_logits.shape[1]):
            emitted = before[row] + position + 1
            if 0 <= emitted < steps or (emitted == steps and row < len(last_rows)):
                compared.append((row, position, emitted))
    index, positions, counts = sent(compared, home).unbind(1)
    distance = _total_variation(forward_logits[index, positions], torch.stack(logits)[counts, index])
    # what one step differs from itself among other rows counts as well: rows that end leave the batch
    figure = max(rounding, distance)
    limit = min(max(EPSILONS * epsilon, ROUNDING * rounding), WORST_ROUNDING) if is_half else LIMIT
    return Difference(figure, limit)


def _preview(runner: ModelRunner, batch: Batch, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, list[int]]:
    """Logits [R, most + 1, V] of one forward, and how many tokens each row had emitted before its first one.

    Args:
        tokens: [R, n], which rows emit one after another; the forward may begin before them.
    """
    rows, number = tokens.shape
    num_refed = min(most + 2 - number, min(batch.prompt_lengths) - 1)  # tokens of the prompts that are fed anew
    num_refed = num_refed if _can_feed_anew(runner, num_refed) else 0
    lead = 0 if runner.lockstep or rows == 1 else 1  # by so many tokens every other row is ahead
    before = [row % 2 * lead - num_refed for row in range(rows)]
    batch.put(tokens)
    if lead and not num_refed:  # rows that are ahead need their first token in the cache
        runner.preview(batch, 1)
    count = min(most + 1, num_refed + number - lead)
    return runner.preview(batch.until(before), count), before


def _can_feed_anew(runner: ModelRunner, count: int) -> bool:
    """Whether the last `count` tokens of all prompts may be fed once more, as tokens that rows have emitted are."""
    config, kwargs = runner.model.config, runner.prompt.kwargs
    is_part = config.get_text_config(decoder=True) is not config  # prompts may hold more than tokens
    if runner.lockstep or is_part or config.is_encoder_decoder:
        return False
    if runner.holes is not None or "token_type_ids" in kwargs:
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
        output[self.name] = host_cache(runner)
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


def host_cache(runner: ModelRunner) -> Cache:
    """A copy of what a runner's cache holds of the prompts, as a cache of transformers' own."""
    if runner.lockstep:
        return copy.deepcopy(runner.cache)
    text: Any = self_attention(runner.cache)
    cross_attention = [] if text is runner.cache else columns_of(runner.cache.cross_attention_cache)
    cache = DynamicCache(config=runner.model.config.get_text_config(decoder=True))
    if isinstance(runner, PackedRunner):
        columns = [runner.row_columns(row, row) for row in range(len(runner.prompt.input_ids))]
        for number, layer_of_rows in enumerate(zip(*columns, strict=True)):
            keys, values = map(torch.stack, zip(*layer_of_rows, strict=True))
            cache.update(keys, values, number)
        return cache
    for number, layer in enumerate(text.layers):
        if layer.is_initialized:  # else it shares the keys of another
            keys, values = layer.in_text_order()
            lacking = runner.width - keys.shape[2]  # what a window has lost nobody sees
            keys, values = (nn.functional.pad(x, (0, 0, lacking, 0)) for x in (keys, values))
            cache.update(keys, values, number)
    return with_cross_attention(cache, cross_attention)


def _epsilon(model: nn.Module) -> float:
    """The precision of the coarsest numbers that a model computes with; torch may multiply float32 in fewer bits."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
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
    sharper = (1 / spread).clamp(1, SHARPEST)
    p, q = (logits * sharper).softmax(-1), (reference * sharper).softmax(-1)
    undefined = p.isnan().all(-1) & q.isnan().all(-1)
    distance = (p - q).abs().sum(-1) / 2
    return float(distance.masked_fill(undefined, 0).nan_to_num(nan=float("inf")).max())
