"""Texts that the target writes after prompts, and the seeds that they are drawn with."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.fingerprint import digest_of, model_fingerprint
from hf_specx.engine.requests import Request
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.pairs.fingerprint import plain_value
from hf_specx.pairs.shares import gathered, processes

from .draft import Learner
from .folder import write_whole
from .reading import Text


ROWS = 16  # texts that are written at once


class Writer:
    """Has the target write texts, with a draft that makes it faster and changes nothing.

    Verification is "coupled": up to rounding a text follows from the target, the prompt and its seed alone. So texts
    do not depend on how far the draft has come, on the number of processes, or on whether a run was interrupted.
    They are kept in a folder and taken from there for the same target, prompts, sampling and seed.
    """

    def __init__(self, target: PreTrainedModel, learner: Learner, folder: Path):
        self.target, self.learner, self.recipe, self.folder = target, learner, learner.recipe, folder
        self.of_target = writer_digest(target)
        self.strategy: Any = None

    def write(
        self, name: str, prompts: Sequence[list[int]], advance: Callable[[int, int], object] = lambda done, total: None
    ) -> list[Text]:
        """One text after each prompt, in order, from seeds that follow from the name; its file is called so too.

        `advance` is called after each text of this process with how many are written, and how many will be.
        """
        options, file = self.recipe.generate_options, self.folder / f"{name}.json"
        made_of = digest_of([json.dumps([self.of_target, prompts, options, self.recipe.seed]).encode()])
        if file.exists() and (known := json.loads(file.read_text()))["made_of"] == made_of:
            return [Text(*each) for each in known["texts"]]

        def share() -> list[tuple[int, list[int]]]:
            state, found = processes(), []
            mine = range(len(prompts))[state.process_index :: state.num_processes]
            asked = [Request(prompts[number], seed=seed_of(self.recipe.seed, name, number)) for number in mine]
            for done in self.strategy.generate_many(self.target, asked, batch_size=ROWS, **options):
                if done.tokens is None:
                    raise ValueError(done.error)
                found.append((mine[done.index], done.tokens))
                advance(len(found), len(mine))
            return found

        if self.strategy is None or self.strategy.draft_model is not self.learner.drafts:
            self.strategy = SpeculativeDecoding(self.learner.drafts)
            self.strategy.verification = "coupled" if self.recipe.do_sample else None
            self.strategy.tokenizer, self.strategy.draft_tokenizer = self.learner.tokenizers
        if isinstance(self.learner.drafts, torch.nn.Module):
            self.learner.drafts.eval()
        new = dict(gathered(share))
        texts = [Text(ids, new[number]) for number, ids in enumerate(prompts)]
        if processes().is_main_process:
            write_whole(file, json.dumps({"made_of": made_of, "texts": texts}))
        return texts


class Phases(torch.utils.data.Dataset[int]):
    """The texts of one phase, by their numbers: the new ones once, and others drawn from all so far.

    Each prompt is used once before any is used again; `written` is called with the new texts of each phase, in order.
    """

    def __init__(self, writer: Writer, prompts: Sequence[list[int]], written: Callable[[list[Text]], object]):
        self.writer, self.prompts, self.recipe, self.written = writer, prompts, writer.recipe, written
        self.texts: list[Text] = []  # all so far, as they are learned from; their places are their numbers
        self.order: list[int] = []  # numbers of the texts of this phase

    def __len__(self) -> int:
        return self.recipe.texts_per_phase * self.recipe.passes

    def __getitem__(self, place: int) -> int:
        return self.order[place]

    def begin(self, phase: int, advance: Callable[[int, int], object]) -> None:
        """Have the texts of a phase, counted from 0, and of those before it that are not here yet."""
        new = self.recipe.texts_per_phase
        while len(self.texts) < new * (phase + 1):
            number = len(self.texts) // new
            prompts = [self._prompt(place) for place in range(number * new, (number + 1) * new)]
            texts = self.writer.write(f"phase-{number:03d}", prompts, advance)
            if self.recipe.learn_from_prompts:  # as if the target had written all but the first token
                texts = [Text(prompt[:1], prompt[1:] + more) for prompt, more in texts]
            texts = [text.cut(self.writer.learner.most) for text in texts]
            self.texts += texts
            self.written(texts)
        generator = torch.Generator("cpu").manual_seed(seed_of(self.recipe.seed, "order", phase))
        drawn = torch.randint(new * (phase + 1), (len(self) - new,), generator=generator, device="cpu").tolist()
        numbers = [*range(new * phase, new * (phase + 1)), *drawn]
        places = torch.randperm(len(numbers), generator=generator, device="cpu").tolist()
        self.order = [numbers[place] for place in places]

    def _prompt(self, place: int) -> list[int]:
        again, number = divmod(place, len(self.prompts))
        generator = torch.Generator("cpu").manual_seed(seed_of(self.recipe.seed, "prompts", again))
        return self.prompts[int(torch.randperm(len(self.prompts), generator=generator, device="cpu")[number])]


def writer_digest(model: PreTrainedModel) -> str:
    """What tells a model from others that write other texts: the model, and how it generates unless it is told."""
    settings = [model_fingerprint(model), plain_value(getattr(model, "generation_config", None))]
    return digest_of([json.dumps(settings).encode()])


def seed_of(seed: int, name: str, number: int) -> int:
    """A seed below 2**56 of its own for each text of each set."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name} {number}".encode()).digest()[:7], "big")
