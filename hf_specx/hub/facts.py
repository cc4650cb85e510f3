"""What a pair's config records of two loaded models and their tokenizers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import constants

from hf_specx.common.drafts import HUB_ID
from hf_specx.common.load_model import COMMIT, auto_class
from hf_specx.common.tokenizers import same_tokens, vocabulary_of
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.vocabulary_map import vocabulary_map

from .pair_config import DraftTokenizer, ModelSource, TokenizerFacts


IDENTIFYING = ("model_type", "vocab_size")  # a model that differs in these is refused


def model_facts(model: PreTrainedModel) -> ModelSource:
    """The `ModelSource` of a loaded model: the id and commit that it was loaded from, and facts about it.

    `name` and `revision` are None if it is not from the Hub; `subfolder` cannot be known, and is "".
    """
    text, commit = model.config.get_text_config(decoder=True), commit_of(model)
    return ModelSource(
        name=None if commit is None else str(model.name_or_path),
        revision=commit,
        auto_class=auto_class(model.config).__name__,
        model_type=getattr(text, "kind", text.model_type),  # a head's
        vocab_size=vocabulary(model),
        parameters=model.num_parameters(),
        max_positions=getattr(text, "max_position_embeddings", None),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def differing(recorded: ModelSource, model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """The facts in which a loaded model differs from what a pair's config has recorded: (now, recorded) by name."""
    facts = model_facts(model)
    values = {name: (getattr(facts, name), getattr(recorded, name)) for name in names}
    return {name: (now, then) for name, (now, then) in values.items() if then not in (None, now)}


def commit_of(model: PreTrainedModel, cache_dir: str | Path | None = None) -> str | None:
    """The commit on the Hub that a model was loaded from; None if it is not known.

    `load_model` notes it in the config, as transformers did up to 5.22. Else it is the commit in the local cache
    (`cache_dir`, or the usual one), if there is only one.
    """
    name = str(model.name_or_path)
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return None
    noted = getattr(model.config, COMMIT, None)
    if noted is not None:
        return str(noted)
    snapshots = Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    commits = [path.parent.name for path in snapshots.glob("*/config.json")]
    return commits[0] if len(commits) == 1 else None


def tokenizer_facts(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase | None = None
) -> TokenizerFacts:
    """The facts about the target's tokenizer, compared with the draft's token by token; None: they share one."""
    if draft_tokenizer is None or draft_tokenizer is tokenizer:
        method = "one"
    elif same_tokens(tokenizer, draft_tokenizer):
        method = "content"
    else:
        method = "own"
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    return TokenizerFacts(method, len(tokenizer.get_vocab()), special, vocabulary_of(tokenizer).digest)


def draft_tokenizer_facts(pair: Any) -> DraftTokenizer | None:
    """The facts about the draft's own tokenizer for a pair's config; None if it has the target's tokens."""
    if same_tokens(pair.tokenizer, pair.draft_tokenizer):
        return None
    facts = tokenizer_facts(pair.draft_tokenizer)
    vocabulary_sizes = (vocabulary(pair.target), vocabulary(pair.draft))
    overlap = vocabulary_map(pair.tokenizer, pair.draft_tokenizer, vocabulary_sizes).overlap
    return DraftTokenizer(facts.tokens, overlap, facts.special_tokens, facts.vocabulary)
