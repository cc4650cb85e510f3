"""Texts that the target writes after prompts, and the seeds that they are drawn with."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.engine.requests import Request
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.pairs.shares import gathered, processes

from .folder import write_whole
from .reading import Text
from .recipe import TrainingRecipe


ROWS = 16  # texts that are written at once
Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]  # of the target and of the draft
SAMPLED = 1024  # numbers of each tensor that a fingerprint reads


class Writer:
    """Has the target write texts, with a draft that makes it faster and changes nothing.

    Verification is "coupled": up to rounding a text follows from the target, the prompt and its seed alone. So texts
    do not depend on how far the draft has come, on the number of processes, or on whether a run was interrupted.

    Args:
        target: in evaluation mode.
        draft: of the moment; the same object while it is trained, left in evaluation mode.
        recipe: how text is sampled.
        folder: texts are kept there, so that an interrupted run does not write them again, nor another one with the
            same target, prompts, sampling and seed.
        tokenizers: of both, needed where one has more pads behind the same tokens.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Any,
        recipe: TrainingRecipe,
        folder: Path,
        tokenizers: Tokenizers = (None, None),
    ):
        self.target, self.draft, self.recipe, self.folder = target, draft, recipe, folder
        self.of_target = fingerprint_of(target)
        how: dict[str, Any] = {"tokenizer": tokenizers[0], "draft_tokenizer": tokenizers[1]}
        self.strategy = SpeculativeDecoding(draft, verification="coupled" if recipe.do_sample else None, **how)

    def write(
        self, name: str, prompts: Sequence[list[int]], advance: Callable[[int, int], object] = lambda done, total: None
    ) -> list[Text]:
        """One text after each prompt, in order.

        Args:
            name: of this set of texts: their seeds follow from it, their file is called so.
            prompts: token ids.
            advance: called after each text of this process with how many are written, and how many will be.
        """
        options, file = self.recipe.generate_options, self.folder / f"{name}.json"
        made_of = hashlib.sha256(json.dumps([self.of_target, prompts, options, self.recipe.seed]).encode()).hexdigest()
        if file.exists() and (known := json.loads(file.read_text()))["made_of"] == made_of:
            return [Text(*each) for each in known["texts"]]
        seeds = [seed_of(self.recipe.seed, name, number) for number in range(len(prompts))]
        numbered = [(number, Request(prompts[number], seed=seed)) for number, seed in enumerate(seeds)]

        def share() -> list[tuple[int, list[int]]]:
            state = processes()
            mine = numbered[state.process_index :: state.num_processes]
            found = []
            each = self.strategy.generate_many(self.target, [r for _, r in mine], batch_size=ROWS, **options)
            for done in each:
                if done.tokens is None:
                    raise ValueError(done.error)
                found.append((mine[done.index][0], done.tokens))
                advance(len(found), len(mine))
            return found

        self.draft.eval()
        new = dict(gathered(share))
        texts = [Text(ids, new[number]) for number, ids in enumerate(prompts)]
        if processes().is_main_process:
            write_whole(file, json.dumps({"made_of": made_of, "texts": texts}))
        return texts


class Phases(torch.utils.data.Dataset[int]):
    """The texts of one phase, by their numbers: the new ones once, and others drawn from all so far.

    Args:
        writer: writes the new ones.
        prompts: token ids; each is used once before any is used again.
        written: called with the new texts of each phase, in order.

    Attributes:
        texts: all so far, as they are learned from; their places are their numbers.
        order: numbers of the texts of this phase.
    """

    def __init__(
        self,
        writer: Writer,
        prompts: Sequence[list[int]],
        written: Callable[[list[Text]], object] = lambda texts: None,
    ):
        self.writer, self.prompts, self.recipe, self.written = writer, prompts, writer.recipe, written
        self.texts: list[Text] = []
        self.order: list[int] = []

    def __len__(self) -> int:
        return self.recipe.texts_per_phase * self.recipe.passes

    def __getitem__(self, place: int) -> int:
        return self.order[place]

    def begin(self, phase: int, advance: Callable[[int, int], object]) -> None:
        """Have the texts of a phase, counted from 0, and of those before it that are not here yet."""
        new = self.recipe.texts_per_phase
        while len(self.texts) < new * (phase + 1):
            number = len(self.texts) // new
            texts = self.writer.write(f"phase-{number:03d}", self._prompts(number), advance)
            if self.recipe.learn_from_prompts:  # as if the target had written all but the first token
                texts = [Text(prompt[:1], prompt[1:] + more) for prompt, more in texts]
            self.texts += texts
            self.written(texts)
        generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, "order", phase))
        drawn = torch.randint(new * (phase + 1), (len(self) - new,), generator=generator).tolist()
        numbers = [*range(new * phase, new * (phase + 1)), *drawn]
        self.order = [numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist()]

    def _prompts(self, phase: int) -> list[list[int]]:
        count = self.recipe.texts_per_phase
        found = []
        for place in range(phase * count, (phase + 1) * count):
            again, number = divmod(place, len(self.prompts))
            generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, "prompts", again))
            found.append(self.prompts[int(torch.randperm(len(self.prompts), generator=generator)[number])])
        return found


def fingerprint_of(model: PreTrainedModel) -> str:
    """A hash of some numbers of each weight, and of how the model generates unless it is told.

    Weights that are offloaded count by their names, shapes and types, and by where the model came from.
    """
    total = hashlib.sha256(model.generation_config.to_json_string(ignore_metadata=True).encode())
    weights = model.state_dict()
    if any(tensor.is_meta for tensor in weights.values()):
        total.update(f"{model.name_or_path} {getattr(model.config, '_commit_hash', None)}".encode())
    for name, tensor in weights.items():
        total.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
            total.update(some.contiguous().numpy().tobytes())
    return total.hexdigest()


def seed_of(seed: int, name: str, number: int) -> int:
    """A seed below 2**56 of its own for each text of each set."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name} {number}".encode()).digest()[:7], "big")
