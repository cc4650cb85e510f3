"""Finds what a target runs beside the code that the tests have shown to be right with several tokens at once.

The sweep of the tests shows model types as transformers ships them. Whatever else runs in a forward is a `Trait`: the
self-check measures a target once for its traits. A trait has the code and the values that this code keeps, as far as
they can be seen, so that another coefficient of a hook, or another hook, is measured anew.
"""

import functools
import sys
import weakref
from collections.abc import Hashable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx.common.architectures import LAYOUTS_OF, MASKED

from .runner import HiddenStates


TRUSTED = ("torch", "transformers", "peft", "accelerate", "deepspeed")  # whose code the tests run in targets
UNTRIED = ("torch.ao", "torch.fx", "torch.jit")  # but for these parts, which run the code of others
STANDARD = sys.stdlib_module_names - {"__main__"}
PLAIN_TENSORS: tuple[type, ...] = (nn.Parameter, torch.Tensor, nn.Buffer)  # whose arithmetic is torch's own
DISTRIBUTED = "torch.distributed"  # where the sharded parameters of ranks come from
OF_GENERATE = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # between forwards
VALUES = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 3  # how deep the values of code are looked at: what a hook's closure has, and what that has
FEW = 8  # entries of a list or dict that may be settings; longer ones are records


class Trait(NamedTuple):
    """Something that a target runs and the tests do not; `identity` tells it from others of the same words."""

    words: str
    identity: Hashable = None


class SameObject:
    """Equals another one of the very same object, as long as that exists; it keeps no object alive."""

    def __init__(self, value: Any):
        self.reference = weakref.ref(value)
        self.number = id(value)

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        value = self.reference()
        return isinstance(other, SameObject) and value is not None and value is other.reference()


def untested_traits(model: PreTrainedModel) -> frozenset[Trait]:
    """What a target runs that the tests have not shown to be right with several tokens at once; empty if nothing.

    These are a model type that is in no table, quantised layers, attention or masks that the tests do not run, and in
    any module: code from outside of `TRUSTED` as its class, as its `forward`, as a hook of torch or accelerate on it,
    or as the arithmetic of its parameters. A hook that has the attribute `reads_only = True` changes nothing and is
    let through.
    """
    traits: set[Trait] = set()
    if model.config.model_type not in LAYOUTS_OF:
        traits.add(Trait(f"model type {model.config.model_type!r} is in no table of the tests"))
    quantized = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    if quantized is not None:
        traits.add(Trait("its layers are quantised"))
    for config in (model.config, model.config.get_text_config(decoder=True)):
        traits |= _foreign_attention(str(config._attn_implementation))
    for name in OF_GENERATE:
        method = getattr(model, name)
        if _is_foreign(method):
            traits.add(Trait(f"{name} of the model is from elsewhere", identity_of(method)))
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        traits |= _foreign_hooks(hooks, "every module", None)
    classes: set[type[nn.Module]] = set()
    for module in model.modules():  # there may be thousands, in each call
        kind, attributes = type(module), vars(module)
        if kind not in classes:
            classes.add(kind)
            traits |= _foreign_kind(kind)
        if _is_foreign_class(kind):
            traits.add(Trait(f"{kind.__qualname__} is a class of {kind.__module__}", _settings_of(module)))
        for name in ("forward", "_old_forward"):  # accelerate keeps what it wraps
            replaced = attributes.get(name)
            if replaced is not None and _is_foreign(replaced):
                traits.add(Trait(f"the forward of a {kind.__qualname__} is from elsewhere", identity_of(replaced)))
        wrapper = attributes.get("_hf_hook")
        for hook in () if wrapper is None else getattr(wrapper, "hooks", [wrapper]):
            if _is_foreign_class(type(hook)):
                traits.add(Trait(f"a hook of accelerate's kind is on {kind.__qualname__}", state_of(hook)))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if attributes.get(name):
                traits |= _foreign_hooks(attributes[name], kind.__qualname__, module)
        for parameter in (attributes.get("_parameters") or {}).values():
            tensor = type(parameter)
            if tensor not in PLAIN_TENSORS and parameter is not None and not tensor.__module__.startswith(DISTRIBUTED):
                traits.add(Trait(f"{kind.__qualname__} has a {tensor.__qualname__} as a parameter"))
    return frozenset(traits)


def describe(traits: frozenset[Trait]) -> str:
    """The first two traits in words, and how many more there are."""
    words = sorted({trait.words for trait in traits})
    return " and ".join(words[:2]) + (f" and {len(words) - 2} more" if len(words) > 2 else "")


def _foreign_attention(name: str) -> set[Trait]:
    """What is foreign in an attention implementation and in the masks that are made for it."""
    traits = set()
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    # ours has `uses`
    is_replaced = function is not None and not hasattr(function, "uses") and _is_foreign(function)
    if name not in MASKED or is_replaced:
        identity = None if function is None else identity_of(function)
        traits.add(Trait(f"attn_implementation={name!r} is not run by the tests", identity))
    mask_function = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if mask_function is not None and _is_foreign(mask_function):
        traits.add(Trait(f"the masks of {name!r} are made elsewhere", identity_of(mask_function)))
    return traits


def _foreign_kind(kind: Any) -> set[Trait]:
    """What is foreign in a trusted class of modules: a `forward` that was put into it."""
    if _is_foreign_class(kind) or not _is_foreign(kind.forward):
        return set()
    return {Trait(f"the forward of {kind.__qualname__} is from elsewhere", identity_of(kind.forward))}


def _settings_of(module: nn.Module) -> Hashable:
    """The code of a module of a foreign class, and its settings: plain attributes, and tensors that are no weights."""
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    forward = getattr(type(module), "forward", None)
    code = identity_of(forward) if isinstance(forward, FunctionType) else type(module).__qualname__
    return SameObject(type(module)), code, _values_of(attributes)


def _foreign_hooks(hooks: dict[int, Any], where: str, module: nn.Module | None) -> set[Trait]:
    """The traits of hooks on a module, or with None on all modules, that may change its output."""
    owner = None if module is None else SameObject(module)
    present = list(hooks.copy().values())  # those of other threads come and go
    changing = [hook for hook in present if not _is_harmless(hook)]
    return {Trait(f"a forward hook is on {where}", (owner, identity_of(hook))) for hook in changing}


def _is_harmless(hook: Any) -> bool:
    """Whether a hook says that it reads only, is trusted, or reads hidden states for a head of any thread or copy."""
    function = getattr(hook, "func", hook)
    if isinstance(function, MethodType) and type(function.__self__).__name__ == HiddenStates.__name__:
        return True
    return getattr(hook, "reads_only", getattr(_code_of(hook), "reads_only", False)) or not _is_foreign(hook)


def _code_of(called: Any) -> Any:
    """The function behind bound methods, partial ones, and what torch has compiled."""
    while True:
        if isinstance(called, functools.partial):
            called = called.func
        elif isinstance(called, MethodType):
            called = called.__func__
        elif getattr(called, "_torchdynamo_orig_callable", None) is not None:
            called = called._torchdynamo_orig_callable
        else:
            return called


def identity_of(called: Any, depth: int = DEPTH) -> Hashable:
    """A key for something that is called: its code, and the values in its closure, arguments and object."""
    if isinstance(called, functools.partial):
        return identity_of(called.func, depth), _values_of(called.args, depth), _values_of(called.keywords, depth)
    if isinstance(called, MethodType):
        return identity_of(called.__func__, depth), state_of(called.__self__, depth - 1)
    original = getattr(called, "_torchdynamo_orig_callable", None)
    if original is not None:
        return identity_of(original, depth)
    if isinstance(called, FunctionType):
        cells = [_content(cell) for cell in called.__closure__ or ()]
        defaults = [*(called.__defaults__ or ()), *(called.__kwdefaults__ or {}).values()]
        return called.__code__, _values_of(cells, depth), _values_of(defaults, depth)
    return state_of(called, depth)


def global_readers(model: nn.Module) -> list[Any]:
    """The hooks and replaced `forward`s of a model that may read global variables, which no trait of it has."""
    called = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    for module in model.modules():
        attributes = vars(module)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            called += list(attributes.get(name, {}).copy().values())  # those of other threads come and go
        called += [attributes["forward"]] if "forward" in attributes else []
    return [each for each in called if _reads_globals(each)]


def _reads_globals(called: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether foreign code may read a global other than functions, and trusted classes and modules.

    Functions among its globals and in its closure are looked into, and no deeper ones.
    """
    code = _code_of(called)
    if type(code) is not FunctionType:
        code = getattr(type(code).__call__, "__wrapped__", type(code).__call__)
    if type(code) is not FunctionType or code in seen or not _is_foreign_function(code):
        return False
    cells = [_content(cell) for cell in code.__closure__ or ()]
    values = [code.__globals__[name] for name in _names(code.__code__) if name in code.__globals__]
    kinds = FunctionType | MethodType | functools.partial
    functions = [value for value in [*values, *cells] if isinstance(value, kinds)]
    trusted = [value for value in values if _is_trusted_global(value)]
    return len(trusted) < len(values) or any(_reads_globals(value, seen | {code}) for value in functions)


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function and in those that are written in it."""
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*(_names(each) for each in inside))


def _is_trusted_global(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return _is_trusted(value.__name__)
    if isinstance(value, type):
        return _is_trusted(value.__module__)
    return isinstance(value, FunctionType | BuiltinFunctionType) or type(value).__module__ == "torch._ops"


def state_of(value: Any, depth: int = DEPTH) -> Hashable:
    """A key for a value that code keeps, which changes with the value; that of a tensor when it is written to."""
    if isinstance(value, VALUES):
        return type(value).__name__, value  # since 1 equals True
    if isinstance(value, torch.Tensor):
        return SameObject(value), None if value.is_inference() else value._version
    if isinstance(value, list | tuple | set | dict):
        return _values_of(value, depth - 1) if len(value) <= FEW else type(value).__name__
    if depth > 0 and isinstance(value, FunctionType | MethodType | functools.partial):
        return identity_of(value, depth - 1)
    try:
        same: Hashable = SameObject(value)
    except TypeError:  # some objects have no weak references
        return type(value).__name__
    attributes = getattr(value, "__dict__", None)
    if depth <= 0 or not isinstance(attributes, dict) or isinstance(value, type | nn.Module):
        return same
    return same, _values_of({name: x for name, x in attributes.items() if isinstance(name, str)}, depth - 1)


def _values_of(values: Any, depth: int = 1) -> Hashable:
    """The keys of several values, with those of a dict; below the last depth only of plain values and tensors."""
    items = list(values.items()) if isinstance(values, dict) else list(enumerate(values))
    if depth <= 0:
        items = [(key, value) for key, value in items if isinstance(value, (*VALUES, torch.Tensor))]
    return tuple((str(key), state_of(value, depth)) for key, value in items)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_foreign(called: Any) -> bool:
    """Whether something that is called, or what it wraps, is from outside of `TRUSTED`."""
    code = _code_of(called)
    return _is_foreign_function(code) if type(code) is FunctionType else _is_foreign_class(type(code))


FOREIGN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a function or class is foreign, once computed


def _is_foreign_function(function: Any) -> bool:
    if function not in FOREIGN:
        FOREIGN[function] = any(not _is_trusted(_module_of(each)) for each in _wrapped(function))
    return FOREIGN[function]


def _wrapped(function: Any) -> list[Any]:
    """A function, what it says that it wraps, and so on."""
    functions = []
    while function is not None:
        functions.append(function)
        function = getattr(function, "__wrapped__", None)
    return functions


def _module_of(function: Any) -> str:
    """Where a function was written: a decorator gives itself the `__module__` of what it wraps."""
    return getattr(function, "__globals__", {}).get("__name__") or str(function.__module__)


def _is_foreign_class(kind: Any) -> bool:
    if kind not in FOREIGN:
        FOREIGN[kind] = not all(_is_trusted(base.__module__) for base in kind.__mro__)
    return FOREIGN[kind]


def _is_trusted(module: str) -> bool:
    root = module.partition(".")[0]
    return (root in TRUSTED and not module.startswith(UNTRIED)) or root in STANDARD
