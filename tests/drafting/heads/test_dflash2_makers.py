"""DFlash2 beside the code of those who make such heads: the same files give the same candidates, and the same q."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from alignment import GREEDY, SAMPLED, loaded, target_of, watched
from head_files import TinyHead, random_head, write
from tiny import prompts
from torch import Tensor

from hf_specx import SpeculativeDecoding


WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 12}
LONG = WINDOW | {"window": 40}  # speculators counts it from the block's first position, which cannot be seen here
Scores = Callable[[list[int], list[Tensor], list[int]], Tensor]  # [V] of a text, its states, and what was drafted


def by_dflash(folder: Path, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear) -> Scores:
    """As the package `dflash` of z-lab computes it."""
    model = pytest.importorskip("dflash.model").DFlash2DraftModel.from_pretrained(folder).eval()
    selector = model.candidate_selector

    def scores(text: list[int], states: list[Tensor], drafted: list[int]) -> Tensor:
        context, place = torch.cat(states, -1)[None], len(drafted)
        block = torch.tensor([[text[-1], *[head.mask_token] * (head.block - 1)]])
        hidden = model(
            target_hidden=context,
            noise_embedding=embeddings[block] * head.embedding_scale,
            position_ids=torch.arange(len(text) - 1 + head.block)[None],
        )[:, 1 + place : 2 + place]
        before = torch.tensor([[*text, *drafted][-1]])
        logits = model.compute_logits(hidden, output)
        _, candidates, probs = selector.select(hidden, logits, before, 1.0)
        return torch.zeros(head.vocab).scatter(0, candidates[0, 0], probs[0, 0]).log()

    return scores


def by_speculators(folder: Path, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear) -> Scores:
    """As the library `speculators` computes it while it trains: one block, behind one text."""
    module = pytest.importorskip("speculators.models.dflash2")
    config = module.DFlash2SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None
    model = module.DFlash2DraftModel.from_pretrained(folder, config=config).eval()
    model.embed_tokens.weight.data, model.lm_head.weight.data = embeddings, output.weight.data
    model.verifier_lm_head.weight.data = output.weight.data

    def scores(text: list[int], states: list[Tensor], drafted: list[int]) -> Tensor:
        anchor = len(text) - 1
        ids = torch.tensor([[*text, *[0] * (head.block + 1)]])
        after = torch.zeros(1, head.block + 2, len(states) * states[0].shape[1])
        loss_mask = (torch.arange(ids.shape[1]) == anchor)[None].long()
        hidden, logits, *_ = model._backbone_forward(
            torch.cat([torch.cat(states, -1)[None], after], 1),
            ids,
            loss_mask,
            torch.zeros(1, ids.shape[1], embeddings.shape[1]),
            torch.zeros_like(ids),
            max_anchors=1,
        )
        slot = len(drafted) + (not head.from_anchor)
        before = torch.tensor([[[*text, *drafted][-1]]])
        candidates, chosen = model.candidate_selector.select(logits[:, slot, None], hidden[:, slot, None], before)
        return torch.full((head.vocab,), -torch.inf).scatter(0, candidates[0, 0], chosen[0, 0])

    return scores


CASES = {
    "z-lab": (by_dflash, {"form": "z-lab 2", "multiplier": 0.5, "softcap": 3.0, "embedding_scale": 2.0}),
    "z-lab with a window": (by_dflash, {"form": "z-lab 2", **WINDOW}),
    "z-lab with a causal window": (by_dflash, {"form": "z-lab 2", **WINDOW, "window_non_causal": False}),
    "speculators": (by_speculators, {"taps": 3}),
    "speculators with its anchor": (by_speculators, {"from_anchor": True, "layers": 2}),
    "speculators with a window": (by_speculators, LONG),
    "speculators with a causal window": (by_speculators, LONG | {"window_non_causal": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_candidates_are_those_of_the_makers_code(case: str, settings: dict, tmp_path: Path, monkeypatch):
    makers, changes = CASES[case]
    target, head = target_of(), random_head("dflash2", **changes)
    draft = loaded(head, tmp_path / "head", target)
    folder = write(head, tmp_path / "head")
    if makers is by_speculators:
        draft.save_pretrained(folder := tmp_path / "saved")
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    watch = watched(strategy, head, target)
    scores = makers(folder, head, target.get_input_embeddings().weight, target.get_output_embeddings())
    monkeypatch.setattr(watch, "logits", lambda text, states, drafted: scores(list(text), states, drafted).double())
    with torch.no_grad():
        target.generate(**prompts(3), **settings | {"max_new_tokens": 12}, custom_generate=strategy)
    watch.check(40)
