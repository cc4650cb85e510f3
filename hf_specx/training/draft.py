"""Draft models that are trained: one that was given, or a copy of the target's first layers."""

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
from .recipe import TrainingRecipe
from .target_outputs import TargetOutputs, Text, collate, labelled_logits


Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]  # of the target and of the draft
PROBE_LENGTH = 8  # tokens on which a copy of the first layers is compared with the layers themselves
LORA_ALPHA = 2  # times the rank


class Learner:
    """A draft, with all that its training needs to know of it.

    Attributes:
        initial: the draft before the training, which leaves it as it is.
        trained: a float32 copy of it, as the Trainer has it.
        drafting: the draft with which the target writes texts during the training.
        recipe, tokenizers: of the training.
        device: where the draft is trained.
        models: those that read prompts and texts.
        hidden_state_taps: the layers of the target whose hidden states the draft reads.
        source: what the draft is made from: a model, or the name of a new head.
        description: of the draft before the training, in words.
        learning_rate: after the warm-up.
        max_learned_tokens: how many tokens at the end of a text are learned; None is all that the target wrote.
    """

    initial: Any
    trained: Any
    drafting: Any
    recipe: TrainingRecipe
    tokenizers: Tokenizers
    device: torch.device
    models: Sequence[PreTrainedModel]
    hidden_state_taps: Sequence[HiddenStateTap] = ()
    source: Any
    description: str
    learning_rate: float
    max_learned_tokens: int | None = None

    def prepare(self, prompts: Sequence[list[int]], texts: Sequence[Text]) -> None:
        """Make what depends on texts; called once, with all prompts and the texts of the first phase."""

    def module(self, draft: PreTrainedModel) -> Any:
        """A draft as the module that `predict` takes."""
        return draft

    def predict(
        self, model: Any, texts: Sequence[Text], outputs: TargetOutputs, draws: Sequence[int] | None = None
    ) -> Predicted:
        """The draft's predictions at the tokens of texts that the target wrote.

        `draws` has a random number for each text, by which a draft may choose tokens to learn; None is all tokens.
        """
        raise NotImplementedError

    def finished(self, trained: Any) -> PreTrainedModel:
        """The trained draft as a plain model, where the initial one is and in its precision."""
        raise NotImplementedError


class ModelDraft(Learner):
    """A draft model, of which all weights are trained, or with LoRA adapters.

    `layers` says as how many of the target's first layers it starts; None is for a model that was given.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        initial: PreTrainedModel,
        recipe: TrainingRecipe,
        tokenizers: Tokenizers = (None, None),
        layers: int | None = None,
    ):
        self.initial, self.recipe, self.tokenizers, self.models = initial, recipe, tokenizers, [target, initial]
        if layers is None:
            self.description = described(initial)
        else:
            self.description = f"the first {layers} layers of the target, with its head"
        width = getattr(initial.config.get_text_config(decoder=True), "hidden_size", 1024)
        self.learning_rate = recipe.rate(int(width), "draft" if layers is None else "layers")
        self.device, self.source = execution_device(initial), initial
        self.trained = self.drafting = trainable_copy(initial, recipe.lora, recipe.seed)

    def predict(
        self, model: Any, texts: Sequence[Text], outputs: TargetOutputs, draws: Sequence[int] | None = None
    ) -> Predicted:
        logits = labelled_logits(model, collate(texts))
        return Predicted(logits, torch.arange(len(logits), device=logits.device))

    def finished(self, trained: Any) -> PreTrainedModel:
        """The trained draft; buffers that are no part of its state, such as rotary frequencies, are not trained."""
        plain = trained.merge_and_unload() if hasattr(trained, "merge_and_unload") else trained
        draft = copy.deepcopy(self.initial)
        draft.load_state_dict(plain.state_dict())
        return draft.eval()


def described(draft: PreTrainedModel) -> str:
    """The words of a card for a draft that was given."""
    name = public_name(draft)
    return f"`{name}`" if name else "a draft that was made here"


@torch.no_grad()
def draft_of_first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own with copies of the target's first layers, its embedding, final norm and head."""
    check_exit_layer(LAYERS.rstrip(":"), count, target)
    name = f"'{LAYERS}{count}'"
    require(
        not any(weight.is_meta for weight in target.parameters()),
        f"{name}: the target has weights that are offloaded to memory or disk, which cannot be copied; name a draft "
        "model instead.",
    )
    require(
        not has_adapters(target),
        f"{name}: the target has adapters of PEFT, which its first layers have as well; train the draft of "
        "target.merge_and_unload().",
    )
    layers, config = EarlyExitDraft(count).first_layers(target), copy.deepcopy(target.config)
    text_config = config.get_text_config(decoder=True)
    for option, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == text_config.num_hidden_layers:
            setattr(text_config, option, value[:count])  # such as layer_types
    text_config.num_hidden_layers = count
    message = (
        f"{name}: a {type(target).__name__} with as many layers of its own does not give what the target's first ones "
        "give; name a draft model instead."
    )
    try:
        draft: Any = type(target)(config).to(dtype=target.dtype, device=target.device)  # type: ignore[call-arg]
        draft.load_state_dict(layers.state_dict())
        buffers = dict(draft.named_buffers())
        for key, buffer in layers.named_buffers():
            # such as rotary frequencies: not in the state, nor in the weights' dtype
            buffers[key].data = buffer.to(buffers[key].device, copy=True)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{message} {error}") from error
    draft.generation_config = copy.deepcopy(target.generation_config)
    ids = torch.arange(PROBE_LENGTH, device=target.device)[None] % text_config.vocab_size
    difference = draft.eval()(ids).logits - layers(ids).logits
    require(bool(difference.abs().max() < 1e-2), message)
    return draft


def trainable_copy(draft: PreTrainedModel, lora: int | None, seed: int) -> Any:
    """A copy in float32 whose weights are trained, or with `lora` as its rank, whose adapters are."""
    copied = copy.deepcopy(draft).float().requires_grad_(lora is None)
    if lora is None:
        return copied
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora={lora} needs peft, which is not installed: pip install peft.") from error
    torch.manual_seed(seed)
    config = LoraConfig(r=lora, lora_alpha=LORA_ALPHA * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(copied, config)
