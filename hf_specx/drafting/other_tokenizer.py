"""Drafts of a model with another tokenizer, which reads the text in tokens of its own.

From Timor et al. 2025 (arXiv 2502.05202), Algorithm 4: it proposes tokens that both tokenizers have.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import padded_rows
from hf_specx.common.wrappers import vocabulary
from hf_specx.models.choose import make_runner
from hf_specx.models.prompts import UNLIMITED, prepare
from hf_specx.models.runner import ModelRunner

from .candidates import SampledCandidateGenerator
from .drafter import DraftContext, TokenizerMatch, shared_prefix_length
from .vocabulary_map import VocabularyMap, vocabulary_map


MATCHES = ("auto", "tokens")
MIN_COVERAGE = 0.5  # coverage from which such a draft is likely to help
MAX_PENDING_BYTES = 32  # after the last boundary; they are written anew whenever a token follows


class Translation:
    """The tokens that one row of the target has emitted, in the draft's tokens, while it grows and is taken back.

    Each token of the target that the draft has as well is one of its own. Others are written in the draft's tokens
    from their bytes, together with such bytes directly before them; a boundary lies after each common token and before
    each space. Nothing before the last boundary changes when more is added.

    Attributes:
        ids: the draft's tokens.
        boundaries: after each token of the target, how many of the draft's come before the last boundary, and the
            bytes after it.
    """

    def __init__(self, vocabularies: VocabularyMap):
        self.draft = vocabularies.draft
        self.target = vocabularies.target
        self.to_draft = vocabularies.to_draft
        self.ids: list[int] = []
        self.boundaries: list[tuple[int, bytes]] = [(0, b"")]

    def extend(self, tokens: list[int]) -> int:
        """Add tokens of the target; returns how many of the draft's tokens are as before."""
        start, pending = self.boundaries[-1]
        new_ids: list[int] = []  # from the last boundary on
        for token in tokens:
            common = self.to_draft[token]
            content = self.target.joined([token])
            is_boundary = common >= 0 or content[:1].isspace() or len(pending) > MAX_PENDING_BYTES
            if pending and is_boundary:
                new_ids += self.draft.encode(pending)
                pending = b""
            if common >= 0:
                new_ids.append(common)
            else:
                pending += content
            self.boundaries.append((start + len(new_ids), pending))
        if pending:
            new_ids += self.draft.encode(pending)
        num_unchanged = start + shared_prefix_length(self.ids[start:], new_ids)
        self.ids[num_unchanged:] = new_ids[num_unchanged - start :]
        return num_unchanged

    def crop(self, count: int) -> None:
        """Keep the first `count` tokens of the target; `ids` follow when more is added."""
        del self.boundaries[count + 1 :]


class OtherTokenizerRunner:
    """A draft with another tokenizer, as a `ModelRunner`: its own text, `draft_batch`, follows that of the target.

    Where the translation of what was fed changes, the cache is rolled back to the first token that differs.
    """

    def __init__(self, runner: ModelRunner, draft_batch: Batch, vocabularies: VocabularyMap):
        self.runner, self.draft_batch, self.vocabularies = runner, draft_batch, vocabularies
        self.translations = [Translation(vocabularies) for _ in draft_batch.counts]  # of all B rows

    @property
    def width(self) -> int:
        return self.runner.width

    def prefill(self) -> None:
        self.runner.prefill()

    def decode_step(self, batch: Batch, ahead: int, num_unfed: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] by the target's ids after `ahead` candidates of the target.

        What the draft has not read of the text with these is written in its own tokens.
        """
        new, counts = [], list(self.draft_batch.counts)
        for row, candidates in zip(batch.rows, batch.candidates(ahead), strict=True):
            translation = self.translations[row]
            tokens = batch.row_states[row].emitted_ids[: batch.counts[row]] + candidates
            counts[row] = translation.extend(tokens[len(translation.boundaries) - 1 :])
            new.append(translation.ids[counts[row] :])
            self.runner.limit_computed_tokens(row, counts[row])
        if counts != self.draft_batch.counts:
            self.draft_batch.rewind(counts)
        numbers = [len(tokens) for tokens in new]
        longest = max(numbers)
        if longest:
            padded = [tokens + [0] * (longest - len(tokens)) for tokens in new]
            self.draft_batch.emit(to_device_async(padded, self.draft_batch.ids.device), numbers, new)
        return self.vocabularies.logits(self.runner.decode_step(self.draft_batch, 0))

    def limit_computed_tokens(self, row: int, count: int) -> None:
        """Keep the first `count` of the target's tokens that a row was fed after its prompt."""
        self.translations[row].crop(count)

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        self.runner.gather_rows(keep_indices)
        staying = set(keep_indices.tolist())
        self.draft_batch.drop_rows([row for index, row in enumerate(self.draft_batch.rows) if index not in staying])

    def forget_prompts(self, rows: list[int]) -> None:
        self.runner.forget_prompts(rows)

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        # where the draft reads late, some may have left meanwhile
        self.draft_batch.drop_rows([row for row in self.draft_batch.rows if row not in batch.rows])
        self.draft_batch.add_rows(batch.rows)
        more = len(self.draft_batch.counts) - len(self.translations)
        self.translations += [Translation(self.vocabularies) for _ in range(more)]
        self.runner.add_rows(self.draft_batch, previous_indices)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        prompts = [self.vocabularies.prompt(batch.row(row).tolist()) for row in rows]
        for row, prompt in zip(rows, prompts, strict=True):
            self.draft_batch.admit(row, RowState(), torch.tensor(prompt, device=self.draft_batch.ids.device))
            self.translations[row] = Translation(self.vocabularies)
        self.runner.admit(self.draft_batch, rows)

    def dummy_run(self, batch: Batch, count: int) -> None:
        self.runner.dummy_run(self.draft_batch, count)


class OtherTokenizerDrafter(SampledCandidateGenerator):
    """Samples candidates from a draft with another tokenizer, among the tokens that both have."""

    has_other_tokenizer = True

    def __init__(self, draft_model: PreTrainedModel, vocabularies: VocabularyMap, tokenizer_match: TokenizerMatch):
        super().__init__(draft_model)
        self.vocabularies, self.tokenizer_match = vocabularies, tokenizer_match

    def _make_runner(self, context: DraftContext) -> OtherTokenizerRunner:
        batch, model = context.batch, self.model
        prompts = [self.vocabularies.prompt(batch.row(row).tolist()) for row in batch.rows]
        inputs = {name: tensor.to(batch.ids) for name, tensor in padded_rows(prompts, "left").items()}
        draft_batch = Batch(inputs["input_ids"], inputs["attention_mask"], 0)
        # one token of the target may be several of the draft's, so there is no limit on these
        inner = make_runner(context.layout, prepare(model, UNLIMITED, inputs), vocabulary(model))
        return OtherTokenizerRunner(inner, draft_batch, self.vocabularies)


def match_tokenizers(
    draft: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
    match: str = "auto",
) -> Any:
    """The same draft or drafts, with a drafter for one call in place of a model with another tokenizer.

    Raises:
        ValueError: if it is not known what the tokens of one stand for, or too few are in both: under "auto" less than
            half of those of a sample text, under "tokens" none.
    """
    if isinstance(draft, Sequence):
        return [match_tokenizers(part, target, tokenizer, draft_tokenizer, match) for part in draft]
    if not isinstance(draft, PreTrainedModel):
        return draft
    vocabularies = vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(target), vocabulary(draft)))
    return OtherTokenizerDrafter(draft, vocabularies, matched(vocabularies, match))


def matched(vocabularies: VocabularyMap, match: str = "auto") -> TokenizerMatch:
    """How two tokenizers are matched, and why.

    Raises:
        ValueError: if they have too few tokens in common.
    """
    coverage = vocabularies.coverage
    common = f"{coverage:.0%} of the tokens of a sample text are in both tokenizers"
    all_the_same = ", or try tokenizer_match='tokens' all the same" if coverage else ""
    require(
        coverage >= (MIN_COVERAGE if match == "auto" else 1e-9),
        f"only {common}, too few for a draft that can propose no others; choose a draft with the target's own "
        f"tokenizer, check that each tokenizer belongs to its model{all_the_same}.",
    )
    reason = f"{'chosen' if match == 'auto' else 'asked for'}: {common}"
    return TokenizerMatch("tokens", reason, vocabularies.overlap, coverage)
