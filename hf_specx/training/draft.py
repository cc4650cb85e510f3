"""What is trained: a draft model, which starts as it was given or as the target's first layers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device
from hf_specx.common.drafts import LAYERS
from hf_specx.common.errors import require
from hf_specx.common.wrappers import has_adapters, public_name
from hf_specx.drafting.early_exit import EarlyExitDraft, check_exit_layer
from hf_specx.models.prompts import HiddenStateTap

from .losses import Predicted
from .reading import Said, Text, collate, logits_where_written
from .recipe import TrainingRecipe


Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]  # of the target and of the draft
PROBE = 8  # tokens on which a copy of the first layers is compared with the layers themselves
LORA_ALPHA = 2  # times the rank


class Learner:
    """A draft that is trained."""

    first: Any  # as it is before, which stays so
    trained: Any  # a float32 copy of it, as the Trainer has it
    drafts: Any  # what drafts meanwhile
    recipe: TrainingRecipe
    tokenizers: Tokenizers
    device: torch.device  # where it is trained
    models: Sequence[PreTrainedModel]  # those that read prompts and texts
    hidden_state_taps: Sequence[HiddenStateTap] = ()  # where in the target it reads states
    made_from: Any  # tells it from others
    in_words: str
    rate: float  # the largest learning rate
    most: int | None = None  # tokens of a text that are learned from, its last ones; None is all that the target wrote

    def begin(self, prompts: Sequence[list[int]], texts: Sequence[Text]) -> None:
        """Called once with all prompts and the texts of the first phase."""

    def module(self, draft: PreTrainedModel) -> Any:
        """A draft as what `predict` takes."""
        return draft

    def predict(self, model: Any, texts: Sequence[Text], said: Said, draws: Sequence[int] | None = None) -> Predicted:
        """What a draft says of texts where the target wrote.

        With a random number for each text a draft may say it of some places alone, to learn from; None is for all.
        """
        raise NotImplementedError

    def finished(self, trained: Any) -> PreTrainedModel:
        """The trained draft as a plain model, where the first one is and in its precision."""
        raise NotImplementedError


class ModelDraft(Learner):
    """A draft model, of which all weights are trained, or with LoRA adapters.

    `layers` says as how many of the target's first layers it starts; None is for a model that was given.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        first: PreTrainedModel,
        recipe: TrainingRecipe,
        tokenizers: Tokenizers = (None, None),
        layers: int | None = None,
    ):
        self.first, self.recipe, self.tokenizers, self.models = first, recipe, tokenizers, [target, first]
        self.in_words = named(first) if layers is None else f"the first {layers} layers of the target, with its head"
        width = getattr(first.config.get_text_config(decoder=True), "hidden_size", 1024)
        self.rate = recipe.rate(int(width), "draft" if layers is None else "layers")
        self.device, self.made_from = execution_device(first), first
        self.trained = self.drafts = trainable_copy(first, recipe.lora, recipe.seed)

    def predict(self, model: Any, texts: Sequence[Text], said: Said, draws: Sequence[int] | None = None) -> Predicted:
        logits = logits_where_written(model, collate(texts))
        return Predicted(logits, torch.arange(len(logits), device=logits.device))

    def finished(self, trained: Any) -> PreTrainedModel:
        """Buffers that are in no state, as rotary frequencies, keep theirs."""
        plain = trained.merge_and_unload() if hasattr(trained, "merge_and_unload") else trained
        made = copy.deepcopy(self.first)
        made.load_state_dict(plain.state_dict())
        return made.eval()


def named(draft: PreTrainedModel) -> str:
    """What a card says of a draft that was given."""
    name = public_name(draft)
    return f"`{name}`" if name else "a draft that was made here"


@torch.no_grad()
def draft_of_first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own with copies of the target's first layers, its embedding, final norm and head."""
    check_exit_layer(LAYERS.rstrip(":"), count, target)
    given = f"'{LAYERS}{count}'"
    told = f"{given}: the target has weights that are offloaded to memory or disk, which cannot be copied; "
    require(not any(weight.is_meta for weight in target.parameters()), told + "name a draft model instead.")
    told = f"{given}: the target has adapters of PEFT, which its first layers have as well; train the draft of "
    require(not has_adapters(target), told + "target.merge_and_unload().")
    layers, config = EarlyExitDraft(count).first_layers(target), copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:count])  # such as layer_types
    text.num_hidden_layers = count
    told = f"{given}: a {type(target).__name__} with as many layers of its own does not give what the target's first "
    told += "ones give; name a draft model instead."
    try:
        draft: Any = type(target)(config).to(dtype=target.dtype, device=target.device)  # type: ignore[call-arg]
        draft.load_state_dict(layers.state_dict())
        own = dict(draft.named_buffers())
        for name, buffer in layers.named_buffers():
            # such as rotary frequencies: not in the state, nor in the weights' dtype
            own[name].data = buffer.to(own[name].device, copy=True)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{told} {error}") from error
    draft.generation_config = copy.deepcopy(target.generation_config)
    ids = torch.arange(PROBE, device=target.device)[None] % text.vocab_size
    apart = draft.eval()(ids).logits - layers(ids).logits
    require(bool(apart.abs().max() < 1e-2), told)
    return draft


def trainable_copy(draft: PreTrainedModel, lora: int | None, seed: int) -> Any:
    """A copy in float32 whose weights are trained, or with `lora` as its rank, whose adapters are."""
    made = copy.deepcopy(draft).float().requires_grad_(lora is None)
    if lora is None:
        return made
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora={lora} needs peft, which is not installed: pip install peft.") from error
    torch.manual_seed(seed)
    config = LoraConfig(r=lora, lora_alpha=LORA_ALPHA * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(made, config)
