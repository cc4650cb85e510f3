"""`HeadNetwork`: what the layers of any kind of head do in a round, in tensors alone, so that torch compiles them."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig


StepOutput = tuple[torch.Tensor, Any]  # normed states [R, n, H] of n candidates, and the state carried to the next one
AdjustedLogits = tuple[torch.Tensor, Any, torch.Tensor | None]  # logits, the carried state, confidences


class HeadNetwork(nn.Module):
    """The layers of a head, without its embedding and its output, which may be the target's.

    It is to a `DraftHead` what `LlamaModel` is to `LlamaForCausalLM`.

    The inputs of a step are entries, which the layers read at one slot each: context entries with the target's states
    [R, m, W] of accepted tokens, and behind them draft entries, such as masks. Most kinds also read embedded tokens
    [R, q, H] of these. The keys and values of entries go to a `HeadCache`.

    A round is `first_step`, then, if the head is autoregressive, a `next_step` for each further candidate. Behind
    each step `adjust_logits` is asked for the logits of each candidate, one after another.
    """

    max_candidates: int | None = None  # of a round; None for any number
    autoregressive = False  # whether each candidate takes a step of its own
    drafts_block = False  # whether the draft entries are a block: the last token and masks, which see each other
    adjusts_logits = False  # whether `adjust_logits` changes anything
    embeds_previous_token = False  # whether `adjust_logits` is given the previous token embedded, [R, 1, H]
    grows_trees = False  # whether `next_step` takes several entries of a row, which are candidates of a tree
    has_attention = True  # whether it attends to earlier entries
    gives_logits = False  # whether its steps give logits in place of states, so that it needs no output
    reads_final_states = False  # whether it reads the target's states behind the final norm, and none of its layers
    config: HeadConfig

    def num_draft_entries(self, num_candidates: int) -> int:
        """How many draft entries stand behind the context of the first step."""
        return 0

    def append_context(self, cache: Any, embedded: Any, states: torch.Tensor) -> None:
        """Write the keys and values of context entries, of which nothing is drafted."""

    def first_step(
        self, cache: Any, embedded: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        """Append context entries, and draft: the first candidate, or all if the head is not autoregressive.

        `newest` [R, 1] is the index of each row's last context entry; None for a head that drafts a block.
        """
        raise NotImplementedError

    def next_step(self, cache: Any, embedded: Any, carried: Any) -> StepOutput:
        """Draft one more candidate behind the embedded last one, [R, 1, H]; of levels behind each of n, [R, n, H]."""
        raise NotImplementedError

    def adjust_logits(
        self, logits: Any, states: torch.Tensor, previous: torch.Tensor, carried: Any, with_confidence: bool
    ) -> AdjustedLogits:
        """Logits [R, V_d] of one candidate, with what the previous token [R, 1] adds to them.

        Besides, the state that the next candidate needs; and if it is asked for and the head can say it, how likely
        this one is accepted, [R, 1].
        """
        return logits, carried, None
