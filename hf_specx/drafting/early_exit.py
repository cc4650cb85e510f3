"""A draft that is its target's own first layers: without a second model, and in the ragged layout without a cache."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_specx.common.altered import altered
from hf_specx.common.batch import Batch
from hf_specx.common.errors import kind, require
from hf_specx.common.wrappers import OfModels, text_decoder
from hf_specx.models.ragged import RaggedRunner
from hf_specx.models.runner import ModelRunner

from .candidates import SampledCandidateGenerator
from .drafter import DraftContext, Drafter, check_number
from .forward_times import ForwardSize


# attributes of a model that do not matter to its forwards; `attached` sets the latter
CHANGING = {"generation_config", "generate"}
NUMBER = "the number of layers that draft"
NO_LAYERS = "give a draft model instead, or SuffixDraft()"


class EarlyExitDraft(Drafter):
    """Drafts with the first layers of the target, its final norm and its head.

    In the ragged layout, unless it is compiled, these layers read and write the target's own keys and values: the
    draft needs no cache and does not read the prompts. Elsewhere it has a cache of its own. The target, its modules
    and its config are not changed. Serves any decoder-only target whose layers are one list, and calls in several
    threads.

    Args:
        exit_layer: how many layers draft, 1 to one less than the target has.
        head: maps hidden states [..., H] to [..., H] between the target's final norm and its head, as trained for this
            exit; None leaves them as they are.

    Raises:
        ValueError: if the number is not an int of 1 or more, or the head is no module; from a call, if the target has
            no such layers.

    Example:
        >>> strategy = SpeculativeDecoding(EarlyExitDraft(4))
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=strategy)
    """

    has_probs = True

    def __init__(self, exit_layer: int, head: nn.Module | None = None):
        check_number("exit_layer", exit_layer, NUMBER)
        require(
            head is None or isinstance(head, nn.Module),
            f"head is {kind(head)}; give a module from hidden states to hidden states, or leave it out.",
        )
        self.exit_layer = int(exit_layer)
        self.head = head
        # by target: its first layers, and the attributes that it had when these were copied
        self.models = OfModels[tuple[PreTrainedModel, list[tuple[str, int]]]]()

    def __repr__(self) -> str:
        head = "" if self.head is None else f", head={type(self.head).__name__}"
        return f"EarlyExitDraft({self.exit_layer}{head})"

    def bind(self, target: PreTrainedModel) -> "EarlyExitDrafter":
        return EarlyExitDrafter(self.first_layers(target), self.exit_layer)

    def first_layers(self, target: PreTrainedModel) -> PreTrainedModel:
        """The target without its later layers: a model that shares its weights and everything else with it.

        It is the same object again until the target is changed, so that what was compiled for it is found.
        """
        path = check_exit_layer("exit_layer", self.exit_layer, target)
        require(
            self.head is None or not self.head.training,
            f"the head of exit_layer={self.exit_layer} is in training mode, where dropout draws random numbers; call "
            "its eval().",
        )
        attributes: list[tuple[str, int]] = []
        for depth in range(len(path) + 1):
            module = target.get_submodule(".".join(path[:depth]))
            for name, value in (*vars(module).items(), *module._modules.items()):
                if name not in CHANGING:
                    attributes.append((name, id(value)))
        model, attributes_then = self.models.get(target, (None, []))
        if model is None or attributes_then != attributes:
            model = self._copy(target, path)
            self.models[target] = model, attributes
        model.generation_config = target.generation_config
        return model

    def _copy(self, target: PreTrainedModel, path: list[str]) -> PreTrainedModel:
        """The target with fewer layers in their list; all else is shared, the config too."""
        layers: Any = target.get_submodule(".".join(path))
        replacements: dict[nn.Module, nn.Module] = {layers: layers[: self.exit_layer]}
        if self.head is not None:
            output: Any = target.get_output_embeddings()
            require(
                output in list(target.children()),
                f"head= goes before an output head, and {type(target).__name__} has none of its own; leave it out.",
            )
            replacements[output] = nn.Sequential(self.head, output)
        model: PreTrainedModel = altered(target, replacements)
        return model


class EarlyExitDrafter(SampledCandidateGenerator):
    """Samples candidates from the first layers of a target; see `EarlyExitDraft`.

    Over the target's own cache there is nothing to read, keep or drop. A step writes keys and values where the forward
    of the round writes them again, from the same inputs; the target was fed all emitted tokens but the last.
    """

    source = "early exit"

    def __init__(self, model: PreTrainedModel, layers: int):
        super().__init__(model)
        self.layers = layers

    def size(self) -> ForwardSize | None:
        size = super().size()  # by the config, which counts all layers
        return None if size is None else size._replace(num_layers=self.layers)

    def _make_runner(self, context: DraftContext) -> ModelRunner | None:
        self.target = context.target if type(context.target) is RaggedRunner else None
        return super()._make_runner(context) if self.target is None else None

    def _ready(self, batch: Batch) -> ModelRunner:
        if self.target is None:
            return super()._ready(batch)
        runner = copy.copy(self.target)  # as it is now, around the first layers
        runner.model = self.model
        runner.has_all_prompt_logits = False
        runner.num_computed_tokens = list(runner.num_computed_tokens)
        return runner


def check_exit_layer(name: str, value: Any, target: PreTrainedModel) -> list[str]:
    """The names of the modules down to the list of a target's layers, if its first `value` layers can draft.

    Raises:
        ValueError: naming the value by `name`, if these are all layers of the target, or it has no such list.
    """
    check_number(name, value, NUMBER)
    path, layers = find_layers(target)
    most = len(layers) - 1
    remedy = f"give 1 to {most}" if most else NO_LAYERS
    require(
        value <= most,
        f"{name}={value} leaves out no layer of {type(target).__name__}, which has {len(layers)}; {remedy}.",
    )
    return path


def find_layers(model: PreTrainedModel, what: str = "early exit from") -> tuple[list[str], nn.ModuleList]:
    """The one list of a model's decoder layers that is nearest to the top, and the names of the modules down to it.

    Raises:
        ValueError: if there is none with as many modules as the config has hidden layers, or the model has an encoder.
    """
    purpose = f"{what} {type(model).__name__}"
    require(not model.config.is_encoder_decoder, f"{purpose}, an encoder-decoder, is not supported; {NO_LAYERS}.")
    decoder = text_decoder(model)
    decoder_name = next(name for name, module in model.named_modules() if module is decoder)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = []
    for name, module in decoder.named_modules(prefix=decoder_name):
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            lists.append((name.split("."), module))
    depth = min((len(path) for path, _ in lists), default=0)
    nearest = [(path, layers) for path, layers in lists if len(path) == depth]
    require(len(nearest) == 1, f"{purpose} is not possible: its {num_layers} layers are no single list; {NO_LAYERS}.")
    return nearest[0]
