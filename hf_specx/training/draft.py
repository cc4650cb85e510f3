"""What is trained: a draft model, which starts as it was given or as the target's first layers."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import unwrapped
from hf_specx.drafting.early_exit import EarlyExitDraft, check_exit_layer
from hf_specx.engine.check_models import check_pair, check_target

from .losses import losses_of
from .reading import logits_where_written
from .recipe import LAYERS_PREFIX, TrainingRecipe, first_layers_wanted
from .texts import Tokenizers


PROBE = 8  # tokens on which a copy of the first layers is compared with the layers themselves
LORA_ALPHA = 2  # times the rank


class ModelDraft:
    """A draft model, and how it is trained.

    Another kind of draft is another class with these attributes and methods, which `draft_to_train` returns.

    Args:
        first: as it was before; it stays so.
        recipe: how it is trained.
        tokenizers: of the target and of the draft, None where they are not known.
        layers: as how many of the target's first layers it starts; None for a model that was given.

    Attributes:
        trained: a float32 copy whose weights change, those of adapters alone with LoRA.
        in_words: what it was, for the card of the pair.
        rate: the largest learning rate.
    """

    def __init__(
        self,
        first: PreTrainedModel,
        recipe: TrainingRecipe,
        tokenizers: Tokenizers = (None, None),
        layers: int | None = None,
    ):
        self.first, self.recipe, self.tokenizers = first, recipe, tokenizers
        named = f"`{first.name_or_path}`" if first.name_or_path else "a draft that was made here"
        self.in_words = named if layers is None else f"the first {layers} layers of the target, with its head"
        width = getattr(first.config.get_text_config(decoder=True), "hidden_size", 1024)
        self.rate = recipe.rate(int(width), from_layers=layers is not None)
        self.trained = trainable_copy(first, recipe.lora, recipe.seed)

    def logits(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The draft's logits [N, V] in float32 for each of the N labels of a batch.

        Args:
            model: `first`, `trained`, or that with what the Trainer has put around it.
            batch: of `collate`.
        """
        return logits_where_written(model, batch)

    def losses(self, model: Any, batch: dict[str, torch.Tensor], target_logits: torch.Tensor) -> torch.Tensor:
        """The loss [N] for each label of a batch, with the target's logits [N, V] for it."""
        of_draft = self.logits(model, batch)
        return losses_of(self.recipe, target_logits.to(of_draft.device), of_draft)

    def finished(self, trained: Any) -> PreTrainedModel:
        """The trained draft as a plain model, where the first one is and in its precision.

        Buffers that are in no state, as rotary frequencies, keep theirs.
        """
        plain = trained.merge_and_unload() if hasattr(trained, "merge_and_unload") else trained
        made = copy.deepcopy(self.first)
        made.load_state_dict(plain.state_dict())
        return made.eval()


def draft_to_train(target: PreTrainedModel, draft: Any, recipe: TrainingRecipe, tokenizers: Tokenizers) -> ModelDraft:
    """What is trained, by what the user has named.

    Raises:
        ValueError: that is no model, cannot be used for this target, or has other tokens; or the target is no decoder.
    """
    check_target(target, 0)
    told = f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets."
    require(not target.config.is_encoder_decoder, told)
    layers = first_layers_wanted(draft)
    if layers is not None:
        return ModelDraft(draft_of_first_layers(target, layers), recipe, (tokenizers[0], tokenizers[0]), layers)
    told = f"draft={brief(draft)} is no model; load one (adapters of peft merged into it), or give 'layers:N'."
    require(isinstance(unwrapped(draft), PreTrainedModel), told)
    check_pair(target, unwrapped(draft), *tokenizers)
    return ModelDraft(unwrapped(draft), recipe, tokenizers)


@torch.no_grad()
def draft_of_first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own with copies of the target's first layers, its embedding, final norm and head.

    Raises:
        ValueError: the target has no list of layers, not enough of them, or a config that cannot say so.
    """
    check_exit_layer(LAYERS_PREFIX.rstrip(":"), count, target)
    given = f"'{LAYERS_PREFIX}{count}'"
    told = f"{given}: the target has weights that are offloaded to memory or disk, which cannot be copied; "
    require(not any(weight.is_meta for weight in target.parameters()), told + "name a draft model instead.")
    layers = EarlyExitDraft(count).first_layers(target)
    config = copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    all_layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == all_layers:
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
