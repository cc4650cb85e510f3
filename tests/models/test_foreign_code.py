"""Whatever way code of others comes into a target, and whenever it changes, it is measured before candidates count."""

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from torch import nn
from transformers import AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from unheard import WRONG, Quantised, int8, quantised, replaced_attention, unheard_of

from hf_specx import Request, SpeculativeDecoding, SuffixDraft
from hf_specx.models import foreign_code
from hf_specx.models.foreign_code import untested_traits
from hf_specx.models.self_check import MAX_RESULTS, RESULTS


NEW = {"max_new_tokens": 24, "do_sample": True, "top_k": 0}
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:.*transformers' own sampler", "ignore:in this batch all rows advance")


def with_mean(states: torch.Tensor) -> torch.Tensor:
    """States [R, q, D] that depend on all tokens of a forward, as no single step's do."""
    return states + states.mean(1, keepdim=True)


def behind_accelerates_hook() -> PreTrainedModel:
    model = tiny()
    add_hook_to_module(model.lm_head, AlignDevicesHook())
    whole = model.lm_head.forward
    model.lm_head.forward = lambda states: whole(with_mean(states))
    return model


class Shifting(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return with_mean(output)


def hook_of_accelerates_kind() -> PreTrainedModel:
    model = tiny()
    add_hook_to_module(model.lm_head, AlignDevicesHook())
    add_hook_to_module(model.lm_head, Shifting(), append=True)
    return model


class Holder:
    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return with_mean(output)


def compiled_method_as_hook() -> PreTrainedModel:
    model = tiny()
    model.lm_head.register_forward_hook(torch.compile(Holder().hook, backend="eager"))
    return model


class Head(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states + states.mean(1, keepdim=True), self.weight)


def scripted() -> PreTrainedModel:
    model = tiny()
    model.lm_head = torch.jit.script(Head(model.lm_head.weight))
    return model


def traced() -> PreTrainedModel:
    model = tiny()
    model.lm_head = torch.fx.symbolic_trace(Head(model.lm_head.weight))
    return model


def prepared_otherwise() -> PreTrainedModel:
    model = tiny()
    whole = model.prepare_inputs_for_generation

    @functools.wraps(whole)
    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = whole(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * 3
        return inputs

    model.prepare_inputs_for_generation = prepare
    return model


class OtherKernel(nn.Linear):
    """Rounds for several tokens and not for one, as kernels that transformers itself integrates do."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[-2] > 1:
            scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
            states = (states / scale).round() * scale
        return nn.functional.linear(states, self.weight, self.bias)


def quantised_by_transformers() -> PreTrainedModel:
    model = quantised(OtherKernel, 0)
    model.config.quantization_config = {"quant_method": "nvfp4"}
    return model


def stored_in_eight_bits() -> PreTrainedModel:
    """Wrong in float32, with a parameter whose precision is no excuse."""
    model = int8()
    scales = torch.zeros(4).to(torch.float8_e4m3fn)
    model.register_parameter("scales", nn.Parameter(scales, requires_grad=False))
    return model


@pytest.mark.parametrize(
    "build",
    [
        behind_accelerates_hook,
        hook_of_accelerates_kind,
        compiled_method_as_hook,
        scripted,
        traced,
        prepared_otherwise,
        quantised_by_transformers,
        stored_in_eight_bits,
    ],
)
def test_it_is_seen(build: Callable[[], PreTrainedModel]):
    target, strategy = build(), coupled(tiny(), 0.05)
    assert untested_traits(target)
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "plain"


def test_the_kernel_alone_would_not_be_seen(monkeypatch: pytest.MonkeyPatch):
    """A class within transformers is trusted, so its model has to say that it is quantised."""
    monkeypatch.setattr(OtherKernel, "__module__", "transformers.integrations.nvfp4")
    globals_ = globals() | {"__name__": OtherKernel.__module__}
    monkeypatch.setattr(OtherKernel, "forward", types.FunctionType(OtherKernel.forward.__code__, globals_))
    foreign_code.FOREIGN.pop(OtherKernel, None)
    target = quantised_by_transformers()
    assert {trait.words for trait in untested_traits(target)} == {"its layers are quantised"}
    foreign_code.FOREIGN.pop(OtherKernel, None)


def test_masks_of_others_are_seen():
    def mine(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
        mask = mask.clone()
        mask[..., 3:6] = False
        return mask

    target, strategy = tiny(), coupled(tiny(), 0.05)
    AttentionMaskInterface.register("sdpa", mine)
    try:
        assert_plain(target, strategy, prompts(1), **NEW)
    finally:
        AttentionMaskInterface.register("sdpa", sdpa_mask)
    assert strategy.report.layout == "plain"
    assert not untested_traits(target)


def steered(model: PreTrainedModel, output: torch.Tensor, coefficient: float) -> torch.Tensor:
    return torch.cat([output[:, :-1], output[:, -1:] + coefficient * VECTOR], 1)


def by_closure(model: PreTrainedModel) -> Callable[[float], None]:
    coefficients = [0.0]
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, args, output: steered(model, output, coefficients[0]))
    return functools.partial(coefficients.__setitem__, 0)


class Steering(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.coefficient = inner, 0.0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return steered(None, self.inner(states), self.coefficient)


def by_attribute(model: PreTrainedModel) -> Callable[[float], None]:
    layer = model.model.layers[0]
    layer.mlp = Steering(layer.mlp)
    return functools.partial(setattr, layer.mlp, "coefficient")


def by_partial(model: PreTrainedModel) -> Callable[[float], None]:
    mlp = model.model.layers[0].mlp
    whole = mlp.forward

    def forward(coefficient: float, states: torch.Tensor) -> torch.Tensor:
        return steered(None, whole(states), coefficient)

    def put(coefficient: float) -> None:
        mlp.forward = functools.partial(forward, coefficient)

    put(0.0)
    return put


def by_object(model: PreTrainedModel) -> Callable[[float], None]:
    class Hook:
        def __init__(self) -> None:
            self.coefficient = 0.0

        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return steered(model, output, self.coefficient)

    hook = Hook()
    model.model.layers[0].register_forward_hook(hook)
    return functools.partial(setattr, hook, "coefficient")


def by_tensor(model: PreTrainedModel) -> Callable[[float], None]:
    vector = torch.zeros(32)
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, args, output: torch.cat([output[:, :-1], output[:, -1:] + vector], 1))
    return lambda coefficient: vector.copy_(coefficient * VECTOR)


@pytest.mark.parametrize("put", [by_closure, by_attribute, by_partial, by_object, by_tensor])
def test_another_coefficient_is_measured_anew(put: Callable[[PreTrainedModel], Callable[[float], None]]):
    target, strategy = tiny(), coupled(tiny(), 0.05)
    set_coefficient = put(target)
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "ragged"
    set_coefficient(1.0)
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "plain"
    set_coefficient(0.0)
    number = len(RESULTS[target])
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "ragged"
    assert put is by_tensor or len(RESULTS[target]) == number  # the first result holds again


@pytest.mark.usefixtures("traced")
def test_what_a_hook_keeps_is_compiled_anew_when_it_changes():
    """A hook that is right, whose coefficient torch would write into the forward as a number."""
    target, coefficients = tiny(num_hidden_layers=1), [0.0]
    target.model.layers[0].register_forward_hook(lambda module, args, output: output + coefficients[0] * VECTOR)
    strategy = coupled(tiny(num_hidden_layers=1), 0.05, compile=True)
    for coefficient in (0.0, 1.0):
        coefficients[0] = coefficient
        texts = []
        for custom_generate in (None, strategy):  # without a hook that counts forwards, which is another in each call
            torch.manual_seed(1)
            texts.append(target.generate(**prompts(1, width=12), **NEW, custom_generate=custom_generate).tolist())
        assert texts[0] == texts[1]
        assert strategy.report.layout == "ragged"


def test_a_longer_round_is_measured_anew():
    """Attention that is wrong from 9 queries behind a cache on."""

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if 8 < query.shape[-2] < key.shape[-2]:
            attention_mask, kwargs["is_causal"] = None, False
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    target = replaced_attention(attention, 0)
    for number, layout in ((4, "padded"), (12, "plain"), (4, "padded")):
        strategy = SpeculativeDecoding(near(tiny(), 0.02), num_draft_tokens=number, verification="coupled")
        assert_plain(target, strategy, prompts(1, width=30), **NEW)
        assert strategy.report.layout == layout


def test_rows_with_pads_are_measured_anew():
    """Attention that ignores pads where it is given several tokens."""

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        queries, keys = query.shape[-2], key.shape[-2]
        if 1 < queries < keys:
            attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
            kwargs["is_causal"] = False
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    target, strategy = replaced_attention(attention, 0), coupled(tiny(), 0.05)
    ids = prompts(1, width=10)["input_ids"]
    assert_plain(target, strategy, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **NEW)
    assert strategy.report.layout == "padded"
    padded = nn.functional.pad(ids, (6, 0))
    mask = nn.functional.pad(torch.ones_like(ids), (6, 0))
    assert_plain(target, strategy, {"input_ids": padded, "attention_mask": mask}, **NEW)
    assert strategy.report.layout == "plain"


def test_later_requests_of_a_queue_are_no_other_conditions():
    """The first prompts are equally long, without pads; a hook changes several tokens behind a cache with pads."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        states, mask = args[0], kwargs["attention_mask"]
        if mask is None or not 1 < states.shape[1] < mask.shape[-1] or bool(mask[..., 0].all()):
            return args, kwargs
        return (states.flip(-1), *args[1:]), kwargs

    target = tiny()
    target.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    asked = [Request(list(range(1, 1 + length)), max_new_tokens=12 + length) for length in (9, 9, 3, 5, 4, 7)]
    strategy = SpeculativeDecoding(near(tiny(), 0.05), num_draft_tokens=4)
    results = list(strategy.generate_many(target, asked, batch_size=2, do_sample=False, ordered=True))
    for request, done in zip(asked, results, strict=True):
        ids = torch.tensor([request.input_ids])
        expected = target.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)
        assert done.tokens == expected[0, ids.shape[1] :].tolist()
    assert {difference.is_rounding for difference in RESULTS[target].values()} == {True, False}


@pytest.mark.parametrize("is_trusted", [True, False])
def test_no_round_is_longer_than_what_was_measured(is_trusted: bool):
    """A list of drafts lets a suffix propose more than "auto" considers; this target repeats one token for ever."""
    target = tiny(max_position_embeddings=256)
    target.lm_head.weight.data.zero_()
    if not is_trusted:
        target.register_forward_hook(lambda *_: None)
    strategy = SpeculativeDecoding([SuffixDraft(64), near(tiny(), 0.05)], verification="coupled")
    ids = torch.tensor([[1, 2, 3, 4, 5] + [0] * 40])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    target.generate(**inputs, max_new_tokens=200, do_sample=False, eos_token_id=None, custom_generate=strategy)
    most = max(record.drafted for record in strategy.report.history[0])
    assert most == 64 if is_trusted else most == next(iter(RESULTS[target])).candidates == 20


def test_another_precision_is_measured_anew():
    """What half precision explains, single precision does not."""

    class Fine(Quantised):
        levels = 900

    target, strategy = quantised(Fine, 0), coupled(tiny(), 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        target.generate(**prompts(2), **NEW, custom_generate=strategy)
    assert strategy.report.layout == "ragged"
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "plain"


def test_longer_prompts_of_an_unknown_type_are_measured_anew():
    """A window of its own, which it applies where no mask for each query is given: prompts shorter than it hide it."""
    window = 16
    target = unheard_of(tiny("llama"))

    class Windowed(type(target.model)):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
        ):
            if attention_mask is None or attention_mask.ndim == 2:
                past = 0 if past_key_values is None else past_key_values.get_seq_length()
                total = past + input_ids.shape[1]
                queries, keys = torch.arange(past, total)[:, None], torch.arange(total)
                attention_mask = ((keys <= queries) & (keys > queries - window))[None, None]
            return super().forward(input_ids, attention_mask, **kwargs)

    target.model.__class__ = Windowed
    strategy = coupled(tiny(), 0.05)
    for length, layouts in ((6, {"ragged"}), (40, {"padded", "lockstep", "plain"})):
        ids = prompts(1, width=length)["input_ids"]
        assert_plain(target, strategy, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=8)
        assert strategy.report.layout in layouts


def wrong_and_unknown() -> PreTrainedModel:
    return unheard_of(WRONG["forward_replaced"]())


def test_a_window_and_a_second_turn_on_its_cache():
    target = unheard_of(tiny("mistral"))
    strategy = coupled(target, 0.05)
    texts = []
    for custom_generate in (None, strategy):
        cache = DynamicCache(config=target.config)
        text = prompts(1, width=12)["input_ids"]
        for _ in range(2):
            mask = torch.ones_like(text)
            settings = {"past_key_values": cache, "max_new_tokens": 8, "do_sample": False}
            text = target.generate(text, attention_mask=mask, **settings, custom_generate=custom_generate)
        texts.append(text.tolist())
    assert texts[0] == texts[1]


def test_compiled_forwards_that_the_next_layouts_do_not_take():
    target = wrong_and_unknown()
    strategy = coupled(tiny(), 0.05, compile=True)
    assert_plain(target, strategy, prompts(2), **NEW)
    assert strategy.report.layout == "plain"


def test_seeds_of_rows_that_would_be_decoded_plainly_are_refused():
    target = wrong_and_unknown()
    strategy = SpeculativeDecoding(near(tiny(), 0.05), num_draft_tokens=4, verification="block")
    with pytest.raises(ValueError, match="leave the seeds out"):
        target.generate(**prompts(2), **NEW, seeds=[1, 2], custom_generate=strategy)


def test_a_vocabulary_smaller_than_the_steps():
    target = tiny(vocab_size=4, pad_token_id=None)
    target.lm_head.register_forward_hook(lambda *_: None)
    ids = torch.tensor([[0, 1, 2, 3, 2, 1]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_plain(target, coupled(target, 0.05), inputs, max_new_tokens=12, do_sample=False)


def test_no_model_is_kept_alive():
    model = tiny()
    model.register_forward_hook(lambda module, args, output, model=model: None)
    model.generate(**prompts(1), max_new_tokens=6, do_sample=False, custom_generate=coupled(tiny(), 0.05))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_the_same_hook_put_on_for_each_call_is_measured_once():
    target, strategy = tiny(), coupled(tiny(), 0.05)
    for _ in range(3):
        handle = target.lm_head.register_forward_hook(lambda module, args, output: output + VECTOR[0])
        target.generate(**prompts(2), max_new_tokens=8, do_sample=False, custom_generate=strategy)
        handle.remove()
    assert len(RESULTS[target]) == 1


def test_results_of_code_that_counts_its_calls_do_not_grow_without_end():
    target, strategy = tiny(), coupled(tiny(), 0.05)

    def count(module: nn.Module, args: Any, output: Any) -> None:
        calls[0] += 1

    calls = [0]
    target.lm_head.register_forward_hook(count)
    for _ in range(MAX_RESULTS + 3):
        target.generate(**prompts(1), max_new_tokens=3, do_sample=False, custom_generate=strategy)
    assert len(RESULTS[target]) == MAX_RESULTS
