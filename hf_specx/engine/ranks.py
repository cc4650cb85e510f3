"""Processes that hold parts of the same models (FSDP, ZeRO-3): each must run the same forwards, in the same order.

A forward of such a model gathers its weights from all ranks, so a rank that runs fewer leaves the others waiting. As
in `generate`, a rank whose text is finished goes on with forwards that are not used until all ranks are finished.
"""

import copy

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.schedule import Schedule
from hf_specx.models.decoder import Decoder
from hf_specx.sampling.processors import Processors


class Ranks:
    """The ranks of one call, which keep step with each other.

    All of them must draft the same number of candidates each round and use the same kind of draft.

    Args:
        synced: whether there are others to keep step with.
        device: of `input_ids`; flags are exchanged on it.
    """

    def __init__(self, synced: bool, device: torch.device):
        self.synced, self.device = synced, device

    def all_finished(self, finished: bool) -> bool:
        """Whether every rank is finished; each rank must ask equally often."""
        if not self.synced:
            return finished
        going = torch.tensor(float(not finished), device=self.device)
        distributed.all_reduce(going)
        return going.item() == 0

    def idle(
        self, target: Decoder, drafter: Drafter, processors: Processors, batch: Batch, schedule: Schedule
    ) -> None:
        """Run the forwards of a round on a copy of the finished text, whose last rows are still in the caches."""
        idle = copy.copy(batch)
        idle.ids, counts = batch.ids.clone(), [batch.counts[row] for row in batch.rows]
        idle.ends = batch.width + torch.tensor(counts, device=batch.ids.device)  # rows may have been cut
        draft = idle.take(drafter.propose(idle, schedule.idle(idle)))
        processors(idle, draft, target(idle, draft).logits)  # guidance has a forward as well


class Agreed(Schedule):
    """The numbers of the first rank, for ranks that hold parts of one model and decode the same rows.

    Each rank has its own clock and so finds its own numbers; with other numbers than the others it would wait for
    ever in the midst of a forward.

    Args:
        own: what this rank would draft.
        device: numbers are exchanged on it.
    """

    def __init__(self, own: Schedule, device: torch.device):
        self.own, self.device = own, device
        super().__init__(own.wanted)

    def __call__(self, batch: Batch) -> list[int]:
        lengths = torch.tensor(self.own(batch), device=self.device)
        distributed.broadcast(lengths, 0)
        return lengths.tolist()

    def observe(self, done: Round) -> None:
        self.own.observe(done)

    def admit(self, row: int, seeded: bool) -> None:
        self.own.admit(row, seeded)

    def end(self) -> None:
        self.own.end()


class OneNumber(Agreed):
    """One number for all rows of all ranks, for ranks that keep step with rows of their own each.

    It is what the first rank finds best for its own rows, and the last that it found once these are finished.
    """

    def __call__(self, batch: Batch) -> list[int]:
        """A rank asks once a round."""
        number = self._meet()
        return [number if batch.counts[row] else 0 for row in batch.rows]

    def idle(self, batch: Batch) -> list[int]:
        return [self._meet()] * len(batch.rows)

    def _meet(self) -> int:
        number = torch.tensor(min(self.own.wanted, self.own.most), device=self.device)
        distributed.broadcast(number, 0)
        return int(number)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is so on some rank; all of them must ask."""
    found = torch.tensor(float(flag), device=device)
    distributed.all_reduce(found)
    return found.item() > 0


def shares_rows(*models: PreTrainedModel) -> bool:
    """Whether a model is spread over ranks by tensor parallelism, so that all of them decode the same rows."""
    return world_size() > 1 and any((getattr(model, "tp_size", None) or 1) > 1 for model in models)


def is_synced(asked: bool | None, *models: PreTrainedModel) -> bool:
    """Whether ranks keep step in a call; `asked` is its `synced_gpus`, None if it was not given."""
    return world_size() > 1 and (synced_by_default(*models) if asked is None else asked)


def synced_by_default(*models: PreTrainedModel) -> bool:
    """Whether any part of the models is spread over ranks, which counts if `synced_gpus` is not given.

    `generate` looks at the target only.
    """
    if world_size() == 1:
        return False
    parts = (part for model in models for part in model.modules())
    return is_deepspeed_zero3_enabled() or any(map(is_fsdp_managed_module, parts))


def world_size() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if in_group() else 1


def in_group() -> bool:
    """Whether this process is in a process group."""
    return distributed.is_available() and distributed.is_initialized()
