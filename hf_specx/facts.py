"""What a config records of two loaded models and their tokenizers."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from .checks_models import tokens_of_another_meaning
from .checks_pairs import HUB_ID
from .decoders import vocabulary
from .pair_config import ModelSource, TokenizerFacts


COMMIT = "_commit_hash"  # of a config; not saved with it


def model_facts(model: PreTrainedModel) -> ModelSource:
    """Where a model came from and what it is; `dtype` is that of the loaded weights, the subfolder is not known.

    Args:
        model: `name` and `revision` are None unless it was loaded from the Hub.
    """
    text, commit = model.config.get_text_config(decoder=True), commit_of(model)
    return ModelSource(
        name=None if commit is None else str(model.name_or_path),
        revision=commit,
        model_type=text.model_type,
        vocab_size=vocabulary(model),
        parameters=model.num_parameters(),
        max_positions=getattr(text, "max_position_embeddings", None),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def commit_of(model: PreTrainedModel) -> str | None:
    """The commit on the Hub that a model was loaded from; None if it is from elsewhere.

    transformers kept it up to 5.22, and we note it on what we load; of others it is the one that the local cache has for
    the main branch.
    """
    name = str(model.name_or_path)
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return None
    known = getattr(model.config, COMMIT, None)
    if known is not None:
        return str(known)
    cached = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return extract_commit_hash(cached, None)


def tokenizer_facts(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase | None = None
) -> TokenizerFacts:
    """How two tokenizers were compared, here and now.

    Args:
        tokenizer: the target's.
        draft_tokenizer: the draft's; None, or the same object, where both models share one.

    Raises:
        ValueError: where a token has another id, or is in one of them only.
    """
    shared = draft_tokenizer is None or draft_tokenizer is tokenizer
    if draft_tokenizer is not None and not shared:
        tokens_of_another_meaning(tokenizer, draft_tokenizer)
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    return TokenizerFacts("one" if shared else "content", len(tokenizer), special)
