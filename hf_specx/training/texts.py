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
from hf_specx.pairs.fingerprint import json_value
from hf_specx.pairs.shares import gathered, processes

from .draft import Learner
from .folder import write_whole
from .target_outputs import Text


ROWS = 16  # texts that are written at once


class Writer:
    """Lets the target write texts, faster with the draft; the draft does not change the texts.

    Verification is "coupled": up to rounding a text follows from the target, the prompt and its seed alone. So texts
    do not depend on how far the draft has come, on the number of processes, or on whether a run was interrupted.
    They are kept in a folder and taken from there for the same target, prompts, sampling and seed.
    """

    def __init__(self, target: PreTrainedModel, learner: Learner, folder: Path):
        self.target, self.learner, self.recipe, self.folder = target, learner, learner.recipe, folder
        self.target_digest = writer_digest(target)
        self.strategy: Any = None

    def write(
        self,
        name: str,
        prompts: Sequence[list[int]],
        show_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> list[Text]:
        """Write one text after each prompt, and return the texts in order; `name` determines the seeds and the file.

        `show_progress` is called after each text of this process with how many are written, and how many will be.
        """
        options, file = self.recipe.generate_options, self.folder / f"{name}.json"
        digest = digest_of([json.dumps([self.target_digest, prompts, options, self.recipe.seed]).encode()])
        if file.exists():
            stored = json.loads(file.read_text())
            if stored["made_of"] == digest:
                return [Text(*text) for text in stored["texts"]]
        self._update_strategy()
        new_tokens = dict(gathered(lambda: self._write_share(name, prompts, show_progress)))
        texts = [Text(ids, new_tokens[number]) for number, ids in enumerate(prompts)]
        if processes().is_main_process:
            write_whole(file, json.dumps({"made_of": digest, "texts": texts}))
        return texts

    def _update_strategy(self) -> None:
        """Let the strategy use the draft as it is now."""
        draft = self.learner.drafting
        if self.strategy is None or self.strategy.draft_model is not draft:
            self.strategy = SpeculativeDecoding(draft)
            self.strategy.verification = "coupled" if self.recipe.do_sample else None
            self.strategy.tokenizer, self.strategy.draft_tokenizer = self.learner.tokenizers
        if isinstance(draft, torch.nn.Module):
            draft.eval()

    def _write_share(
        self, name: str, prompts: Sequence[list[int]], show_progress: Callable[[int, int], object]
    ) -> list[tuple[int, list[int]]]:
        """Write this process's share of the texts; returns the number and the new tokens of each."""
        state = processes()
        numbers = range(len(prompts))[state.process_index :: state.num_processes]
        requests = [Request(prompts[number], seed=seed_of(self.recipe.seed, name, number)) for number in numbers]
        options = self.recipe.generate_options
        texts: list[tuple[int, list[int]]] = []
        for completion in self.strategy.generate_many(self.target, requests, batch_size=ROWS, **options):
            if completion.tokens is None:
                raise ValueError(f"prompt {numbers[completion.index]}: {completion.error}")
            texts.append((numbers[completion.index], completion.tokens))
            show_progress(len(texts), len(numbers))
        return texts


class Phases(torch.utils.data.Dataset[int]):
    """The texts of one phase, by their numbers: the new ones once, and others drawn from all so far.

    Each prompt is used once before any is used again.

    Args:
        on_texts: called with the new texts of each phase, in order.

    Attributes:
        texts: all so far, as they are learned from; their indices are their numbers.
        order: numbers of the texts of this phase.
    """

    def __init__(self, writer: Writer, prompts: Sequence[list[int]], on_texts: Callable[[list[Text]], object]):
        self.writer, self.prompts, self.recipe, self.on_texts = writer, prompts, writer.recipe, on_texts
        self.texts: list[Text] = []
        self.order: list[int] = []

    def __len__(self) -> int:
        return self.recipe.texts_per_phase * self.recipe.passes

    def __getitem__(self, index: int) -> int:
        return self.order[index]

    def start(self, phase: int, show_progress: Callable[[int, int], object]) -> None:
        """Write the texts of a phase, counted from 0, and of earlier phases that are missing, and choose its order."""
        num_new = self.recipe.texts_per_phase
        while len(self.texts) < num_new * (phase + 1):
            missing_phase = len(self.texts) // num_new
            indices = range(missing_phase * num_new, (missing_phase + 1) * num_new)
            prompts = [self._prompt(index) for index in indices]
            texts = self.writer.write(f"phase-{missing_phase:03d}", prompts, show_progress)
            if self.recipe.learn_from_prompts:  # as if the target had written all but the first token
                texts = [Text(prompt[:1], prompt[1:] + new) for prompt, new in texts]
            texts = [text.cut(self.writer.learner.max_learned_tokens) for text in texts]
            self.texts += texts
            self.on_texts(texts)
        generator = torch.Generator("cpu").manual_seed(seed_of(self.recipe.seed, "order", phase))
        drawn = torch.randint(num_new * (phase + 1), (len(self) - num_new,), generator=generator, device="cpu")
        numbers = [*range(num_new * phase, num_new * (phase + 1)), *drawn.tolist()]
        order = torch.randperm(len(numbers), generator=generator, device="cpu").tolist()
        self.order = [numbers[index] for index in order]

    def _prompt(self, index: int) -> list[int]:
        """The prompt of text `index`, counted over all phases."""
        repetition, number = divmod(index, len(self.prompts))
        generator = torch.Generator("cpu").manual_seed(seed_of(self.recipe.seed, "prompts", repetition))
        return self.prompts[int(torch.randperm(len(self.prompts), generator=generator, device="cpu")[number])]


def writer_digest(model: PreTrainedModel) -> str:
    """A digest of a model and its generation config: equal digests mean that it writes the same texts."""
    settings = [model_fingerprint(model), json_value(getattr(model, "generation_config", None))]
    return digest_of([json.dumps(settings).encode()])


def seed_of(seed: int, name: str, number: int) -> int:
    """A seed below 2**56, another one for each text of each set."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name} {number}".encode()).digest()[:7], "big")
