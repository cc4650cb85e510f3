"""Who proposes: `CandidateGenerator` subclasses that draft for all rows of a batch at once."""

import sys
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx.common.batch import Sequences
from hf_specx.layouts.choose import layouts_of, make_decoder
from hf_specx.layouts.decoder import Decoder, vocabulary
from hf_specx.layouts.prompts import prepare
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rules import Draft, Rule

from .schedule import Confidence


class SampledCandidateGenerator(CandidateGenerator):
    """Drafts by sampling from the draft model's own processed law, with a cache of its own.

    hf_specx drives it for whole batches through `read` and `propose`. It is also a complete `CandidateGenerator`: a
    model that returns one from `_get_candidate_generator` runs it in stock's own assisted decoding, at batch 1.

    Args:
        draft_model: the draft; its token ids mean what the target's mean.
        processors: the target's processors, applied to the draft's scores once, as to the target's.
        rule: draws a candidate from scores.
        vocab_size: of the target; the draft's scores are cut, or filled up with -inf, to this size.
        num_draft_tokens: K where stock asks through `get_candidates`.
        decoder: the draft model with the prompts read; None where stock drives.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        processors: Processors,
        rule: Rule,
        vocab_size: int,
        num_draft_tokens: int = 5,
        decoder: Decoder | None = None,
    ):
        self.draft_model, self.processors, self.rule = draft_model, processors, rule
        self.vocab_size, self.num_draft_tokens = vocab_size, num_draft_tokens
        self.decoder = decoder
        self.sequences: Sequences | None = None

    def propose(self, sequences: Sequences, num_draft_tokens: int, threshold: float = 0.0) -> Draft:
        """Draft for every decoding row, writing the candidates behind the rows' ends.

        Args:
            sequences: the text so far.
            num_draft_tokens: K, at most.
            threshold: of the draft's confidence; see `Drafting`.
        """
        assert self.decoder is not None
        tokens, laws, confidence = [], [], Confidence(threshold)
        for ahead in range(num_draft_tokens):
            logits = self._sized(self.decoder.step(sequences, ahead))
            scores = self.processors(sequences, logits, ahead)[:, 0]
            token, law = self.rule.choose(sequences, scores, ahead)
            token = sequences.padded(token)
            sequences.put(token[:, None], ahead)
            tokens.append(token)
            laws.append(law)
            live = slice(None) if sequences.over is None else ~sequences.over
            if threshold and confidence.is_lost(scores[live], token[live]):
                break
        known = [law for law in laws if law is not None]
        return Draft(torch.stack(tokens, 1), torch.stack(known, 1) if known else None)

    def _sized(self, logits: torch.Tensor) -> torch.Tensor:
        surplus = self.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, surplus), value=-torch.inf) if surplus else logits

    def leave(self, rows: list[int], places: torch.Tensor | None) -> None:
        """Keep only those of the decoding rows that are at places [R']; all of them where None."""
        self.processors.leave(rows, places)
        if self.decoder is not None:
            self.decoder.leave(rows, places)

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Stock's side of the contract, for unpadded batches of 1.

        Args:
            input_ids: [1, L], the text so far.

        Returns:
            [1, L + K] ids, and [1, K, V] log-probabilities of the law the candidates were drawn from (None if greedy).
        """
        if self.sequences is None:
            self.sequences = Sequences(input_ids, None, pad_token_id=0)
            mask = torch.ones_like(input_ids)
            given = {"input_ids": input_ids, "attention_mask": mask}
            prompt = prepare(self.draft_model, sys.maxsize, given)
            layout = layouts_of(self.draft_model, drafts=True)[0]
            self.decoder = make_decoder(layout, prompt, vocabulary(self.draft_model))
            self.decoder.read()
        self.sequences.extend(input_ids)
        draft = self.propose(self.sequences, self.num_draft_tokens)
        logits = None if draft.probs is None else draft.probs.log()
        return torch.cat([input_ids, draft.tokens], -1), logits  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do: the next text tells what was kept."""


class ForeignCandidateGenerator(CandidateGenerator):
    """Any other `CandidateGenerator`, asked row by row; its candidates are taken as given, not as draws from a law.

    Rows that propose less than others are filled up with token 0, which is a candidate like any other: matching
    verification is exact for whatever is proposed.

    Args:
        generator: gets one row at a time, without pads; it is not told what was kept.
        vocab_size: of the target.
    """

    def __init__(self, generator: CandidateGenerator, vocab_size: int):
        self.generator, self.vocab_size = generator, vocab_size

    def propose(self, sequences: Sequences, num_draft_tokens: int, threshold: float = 0.0) -> Draft:
        """As in `SampledCandidateGenerator`; K is the longest proposal, at most `num_draft_tokens`."""
        found = []
        over = [False] * len(sequences.rows) if sequences.over is None else sequences.over.tolist()
        for row, is_over in zip(sequences.rows, over, strict=True):
            prefix = sequences.row(row)[None]
            candidates = prefix if is_over else self.generator.get_candidates(prefix)[0]  # type: ignore[arg-type]
            found.append(candidates[0, prefix.shape[1] :][:num_draft_tokens])
        tokens = torch.nn.utils.rnn.pad_sequence(found, batch_first=True).to(sequences.ids)
        if ((tokens < 0) | (tokens >= self.vocab_size)).any():
            raise ValueError(
                f"{type(self.generator).__name__} proposes ids outside of the target's vocabulary, 0 to "
                f"{self.vocab_size - 1}; use a generator for this target."
            )
        if sequences.over is not None:
            tokens = tokens.masked_fill(sequences.over[:, None], sequences.pad_token_id)
        sequences.put(tokens)
        return Draft(tokens, None)

    def leave(self, rows: list[int], places: torch.Tensor | None) -> None:
        pass


Drafter = SampledCandidateGenerator | ForeignCandidateGenerator
