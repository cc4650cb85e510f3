"""Whether a head proposes what it must: each candidate of each round beside the reference, over the whole text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import TinyHead, write
from head_reference import confidences, round_logits, target_states
from plain import assert_plain
from tiny import tiny
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specx import DraftHead, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.common.tree import row_tree_of
from hf_specx.drafting.heads.block import Block
from hf_specx.drafting.heads.dflash2 import DFlash2
from hf_specx.drafting.heads.head_drafter import HeadDrafter


LAYERS = 8
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
LOOSE = 2.5  # the temperature of all that is sampled here, so that candidates of random heads are accepted
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": LOOSE, "max_new_tokens": 24, "pad_token_id": 0}


def target_of(**changes: Any) -> PreTrainedModel:
    """A target of 8 layers, whose states are worth reading."""
    return tiny(**{"num_hidden_layers": LAYERS} | changes)


class Aligned:
    """A listener that compares each candidate, and the law it was drawn from, with those of the reference.

    Attributes:
        compared: candidates so far; `wrong`: rounds and rows where one is not what it must be.
        lengths: candidates of each round and row.
        cut, most: below which confidence of its own a head ends a row, of so many candidates.
        prefix: tokens of each row of whose states nothing is known; `row`, the one that is compared.
    """

    def __init__(self, head: TinyHead, target: PreTrainedModel, cut: float = 0.0, most: int = 3, prefix: int = 0):
        self.head, self.target, self.cut, self.most, self.prefix = in_doubles(head), target, cut, most, prefix
        self.compared, self.wrong = 0, list[str]()
        self.lengths: list[list[int]] = []

    def observe(self, done: Round) -> None:
        self.lengths.append(list(done.draft.lengths))
        texts: dict[int, list[int]] = {}
        for index, (row, length) in enumerate(zip(done.rows, done.draft.lengths, strict=True)):
            if length or (self.cut and done.emitted_before[index]):  # nothing is known behind a prompt alone
                text = done.batch.row(row)
                texts[row] = text[: done.batch.row_states[row].prompt_length + done.emitted_before[index]].tolist()
        for (row, text), states in zip(texts.items(), self.states(texts), strict=True):
            self._compare(done, done.rows.index(row), text, states)

    def _compare(self, done: Round, index: int, text: list[int], states: Any) -> None:
        self.row, length = done.rows[index], done.draft.lengths[index]
        drafted = done.draft.tokens[index, :length].tolist()
        for place, logits in enumerate(self.logits(text, states, drafted)):
            self.compared += 1
            if done.draft.probs is None:
                right = int(logits.argmax()) == drafted[place]
            else:
                probs = done.draft.probs[index, place].double()
                right = torch.allclose(probs, (logits / LOOSE).softmax(-1), atol=2e-4)
            if not right:
                self.wrong.append(f"round {len(self.lengths)}, row {self.row}, candidate {place}")
        if self.cut:
            embeddings, wanted = self.target.get_input_embeddings().weight, done.batch.row_states[self.row].limit - 1
            sure = confidences(self.head, embeddings, text, states, [*drafted, 0])[: self.most] >= self.cut
            wanted = min(self.most, wanted - done.emitted_before[index])
            assert sure[:wanted].tolist() == [True] * length + [False] * (wanted > length)

    def check(self, least: int = 0) -> None:
        """More than so many candidates were compared, and all are right."""
        assert self.compared > least
        assert not self.wrong, self.wrong

    def states(self, texts: dict[int, list[int]]) -> list[Any]:
        """What the target gives for the texts of rows but their last tokens; pads behind a text change nothing."""
        if not texts:
            return []
        ids = pad_sequence([torch.tensor(text[:-1]) for text in texts.values()], batch_first=True)
        by_layer = target_states(self.target, self.head.layer_ids or [None], ids)
        lengths = [len(text) - 1 for text in texts.values()]
        return [[state[index, self.prefix : length] for state in by_layer] for index, length in enumerate(lengths)]

    def logits(self, text: Sequence[int], states: list[torch.Tensor], drafted: Sequence[int]) -> list[torch.Tensor]:
        """[V] of each candidate, those before it known; the last one has no influence."""
        if not drafted:
            return []
        table = self.target.get_input_embeddings()
        embeddings = table.weight * getattr(table, "embed_scale", 1.0)  # of Gemma
        output = self.target.get_output_embeddings().weight
        return round_logits(self.head, embeddings, output, text[self.prefix :], states, drafted)


class NodesAligned(Aligned):
    """As `Aligned`, of every node of greedy trees: it is what the reference has at its rank behind those before it."""

    def __init__(self, head: TinyHead, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, **watching: Any):
        super().__init__(head, target, **watching)
        self.draft: Draft | None = None
        write = Batch.write_draft

        def recorded(batch: Batch, draft: Draft) -> Draft:
            self.draft = draft
            return write(batch, draft)

        monkeypatch.setattr(Batch, "write_draft", recorded)

    def _compare(self, done: Round, index: int, text: list[int], states: Any) -> None:
        assert self.draft is not None
        drafted = self.draft.tokens[index].tolist()
        parents = (
            tuple(range(-1, self.draft.lengths[index] - 1)) if done.tree is None else done.tree.parents_of_rows[index]
        )
        tree, behind = row_tree_of(parents), dict[tuple[int, ...], torch.Tensor]()
        for node, (path, rank) in enumerate(zip(tree.node_prefixes[1:], tree.ranks, strict=True)):
            before = path[:-1]
            if before not in behind:
                behind[before] = self.logits(text, states, [*(drafted[number] for number in before), 0])[-1]
            logits = behind[before]
            self.compared += 1
            logit, right = logits[drafted[node]], logits.sort(descending=True).values[rank]
            if not (logit == right or abs(logit - right) < 1e-4):  # all that DFlash2 does not select are at -inf
                self.wrong.append(f"round {len(self.lengths)}, row {done.rows[index]}, node {path}")


def in_doubles(head: Any) -> Any:
    """A head whose weights the reference does not have to convert for each candidate."""
    if not isinstance(head, TinyHead):
        return head
    weights = {name: value.double() if value.is_floating_point() else value for name, value in head.weights.items()}
    return replace(head, weights=weights)


def loaded(head: TinyHead, folder: Path, target: PreTrainedModel, **loading: Any) -> DraftHead:
    """The head, written in a published form and read again."""
    return DraftHead.from_pretrained(write(head, folder), target=target, **loading)


def watched(strategy: SpeculativeDecoding, head: TinyHead, target: PreTrainedModel, **watching: Any) -> Aligned:
    """The listener of a strategy."""
    watch = Aligned(head, target, **watching)
    strategy.listeners = (watch,)
    return watch


def assert_aligned(
    head: TinyHead,
    draft: DraftHead,
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    settings: dict[str, Any] | None = None,
    least: int = 0,
    **options: Any,
) -> Aligned:
    """More than the least number of candidates of a call are those of the reference."""
    strategy = SpeculativeDecoding(draft, **{"num_draft_tokens": 3} | options)
    watch = watched(strategy, head, target)
    torch.manual_seed(1)
    target.generate(**inputs, **settings or GREEDY, custom_generate=strategy)
    watch.check(least)
    return watch


def assert_equals_stock(
    draft: DraftHead, target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any
) -> None:
    """Greedy and sampled texts are those of plain `generate`."""
    for settings in (GREEDY, SAMPLED):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", **options)
        assert_plain(target, strategy, inputs, **settings)
    assert strategy.report.accepted > 0


LAST, FIRST_STEP, SHIFTED_TOKENS = Batch.last, HeadDrafter.first_step, HeadDrafter.shifted_tokens
ADJUST, SELECT = Block.adjust_logits, DFlash2.adjust_logits


def unshifted(drafter: HeadDrafter, ids: Any, rows: Any, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens of the states themselves, in place of those behind them."""
    return SHIFTED_TOKENS(drafter, ids, rows, starts - 1, width)


def begun_early(drafter: HeadDrafter, batch: Batch) -> None:
    """A block begins with the last token whose states are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "last", lambda batch, count, ahead=0: LAST(batch, count + 1, ahead)[:, :count])
        FIRST_STEP(drafter, batch)


def adjusted_early(
    network: Block, logits: Any, states: Any, previous: torch.Tensor, carried: Any, with_confidence: bool
) -> Any:
    """Logits are adjusted by the token before the previous one."""
    earlier, inner = carried or (previous, None)
    logits, inner, confidence = ADJUST(network, logits, states, earlier, inner, with_confidence)
    return logits, (previous, inner), confidence


def selected_early(
    network: DFlash2, logits: Any, states: Any, previous: torch.Tensor, carried: Any, with_confidence: bool
) -> Any:
    """As `adjusted_early`, of the selector."""
    earlier = previous if carried is None else carried
    return SELECT(network, logits, states, earlier, None, with_confidence)[0], previous, None
