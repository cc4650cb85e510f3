"""Heads beside the code of those who make them: the same files give the same candidates, and the same q.

`pip install --target FOLDER --no-deps dflash speculators distro`, with the folder at the end of PYTHONPATH.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import GREEDY, SAMPLED, loaded, target_of, watched
from head_files import TinyHead, random_head, write
from safetensors.torch import load_file
from tiny import prompts
from torch import Tensor

from hf_specx import SpeculativeDecoding


WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 12}
LONG = WINDOW | {"window": 40}  # speculators counts it from the block's first position, which cannot be seen here
Scores = Callable[[list[int], list[Tensor], list[int]], Tensor]  # [V] of a text, its states, and what was drafted
Makers = Callable[[Path, TinyHead, Tensor, torch.nn.Linear], Scores]


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


def of_speculators(
    folder: Path, name: str, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear
) -> tuple[Any, Any]:
    """The module of a kind of head in the library `speculators`, and such a head with what it takes of the target."""
    module = pytest.importorskip(f"speculators.models.{name.lower()}.core")
    model_class = getattr(module, f"{name}DraftModel")
    config = model_class.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None
    model = model_class(config).eval()
    _, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected
    if "embed_tokens.weight" not in head.weights:
        model.embed_tokens.weight.data = embeddings
    if "lm_head.weight" not in head.weights:
        model.lm_head.weight.data = output.weight.data
    return module, model


def at_ids(scores: Tensor, model: Any, head: TinyHead) -> Tensor:
    """[V] by the target's ids of [V_d] by the head's."""
    if model.d2t is None or len(scores) == head.vocab:
        return scores
    ids = torch.arange(len(scores)) + model.d2t
    return torch.full((head.vocab,), -torch.inf).index_copy(0, ids, scores)


def noted_logits(model: Any) -> list[Tensor]:
    """What its output layer gives, from now on."""
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    return logits


def block_by_speculators(name: str) -> Makers:
    """As the library computes a block while it trains: one, behind one text."""

    def by_speculators(folder: Path, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear) -> Scores:
        _, model = of_speculators(folder, name, head, embeddings, output)
        model.verifier_lm_head.weight.data = model.lm_head.weight.data

        def scores(text: list[int], states: list[Tensor], drafted: list[int]) -> Tensor:
            anchor = len(text) - 1
            ids = torch.tensor([[*text, *drafted, *[0] * (head.block + 1 - len(drafted))]])
            after = torch.zeros(1, head.block + 2, len(states) * states[0].shape[1])
            hidden, logits, *_ = model._backbone_forward(
                torch.cat([torch.cat(states, -1)[None], after], 1),
                ids,
                (torch.arange(ids.shape[1]) == anchor)[None].long(),
                torch.zeros(1, ids.shape[1], embeddings.shape[1]),
                torch.zeros_like(ids),
                max_anchors=1,
            )
            slot = len(drafted) + (not head.from_anchor)
            block = ids[:, anchor : anchor + head.block]
            before = block if head.from_anchor else torch.cat([block[:, :1], block[:, :-1]], 1)
            if name == "DFlash2":
                of_slot = [values[:, slot, None] for values in (logits, hidden, before)]
                candidates, chosen = model.candidate_selector.select(*of_slot)
                return torch.full((head.vocab,), -torch.inf).scatter(0, candidates[0, 0], chosen[0, 0])
            if name == "DSpark":
                logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
            return at_ids(logits[0, slot], model, head)

        return scores

    return by_speculators


def eagle3_by_speculators(folder: Path, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear) -> Scores:
    """As the library computes each step of its training-time test, with the drafted tokens as the true ones."""
    _, model = of_speculators(folder, "Eagle3", head, embeddings, output)
    logits = noted_logits(model)

    def scores(text: list[int], states: list[Tensor], drafted: list[int]) -> Tensor:
        logits.clear()
        after = torch.zeros(1, len(drafted), len(states) * states[0].shape[1])
        ids = torch.tensor([[*text[1:], *drafted]])
        hidden = torch.cat([torch.cat(states, -1)[None], after], 1)
        model(hidden, ids, torch.zeros_like(ids), ttt_steps=len(drafted) + 1)
        return at_ids(logits[-1][0, len(text) - 2], model, head)

    return scores


def peagle_by_speculators(folder: Path, head: TinyHead, embeddings: Tensor, output: torch.nn.Linear) -> Scores:
    """As the library computes the masks behind the last entry of a text while it trains."""
    module, model = of_speculators(folder, "PEagle", head, embeddings, output)
    logits = noted_logits(model)

    def scores(text: list[int], states: list[Tensor], drafted: list[int]) -> Tensor:
        number, depths = len(text) - 1, torch.arange(len(drafted) + 1)
        anchors = torch.cat([torch.arange(number), torch.full((len(drafted),), number - 1)])
        depth = torch.cat([torch.zeros(number, dtype=torch.int64), depths[1:]])
        after = torch.zeros(1, len(drafted), len(states) * states[0].shape[1])
        ids = torch.tensor([[*text[1:], *[0] * len(drafted)]])
        hidden = torch.cat([torch.cat(states, -1)[None], after], 1)
        logits.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "generate_cod_sample_indices", lambda **_: (anchors, depth))
            patch.setattr(module, "compute_metrics", lambda **_: (None, None))
            last = torch.zeros(1, ids.shape[1], embeddings.shape[1])
            model(hidden, ids, torch.zeros_like(ids), verifier_last_hidden_states=last)
        return at_ids(logits[0][0, -1], model, head)

    return scores


PART = {"draft_vocab": 24}
CASES: dict[str, tuple[Makers, str, dict[str, Any]]] = {  # whose code, and the head
    "DFlash2 of z-lab": (
        by_dflash,
        "dflash2",
        {"form": "z-lab 2", "multiplier": 0.5, "softcap": 3.0, "embedding_scale": 2.0},
    ),
    "DFlash2 of z-lab with a window": (by_dflash, "dflash2", {"form": "z-lab 2", **WINDOW}),
    "DFlash2 of z-lab with a causal window": (
        by_dflash,
        "dflash2",
        {"form": "z-lab 2", **WINDOW, "window_non_causal": False},
    ),
    "DFlash2": (block_by_speculators("DFlash2"), "dflash2", {"taps": 3}),
    "DFlash2 from its anchor": (block_by_speculators("DFlash2"), "dflash2", {"from_anchor": True, "layers": 2}),
    "DFlash2 with a window": (block_by_speculators("DFlash2"), "dflash2", LONG),
    "DFlash2 with a causal window": (
        block_by_speculators("DFlash2"),
        "dflash2",
        LONG | {"window_non_causal": False},
    ),
    "DFlash": (block_by_speculators("DFlash"), "dflash", {"layers": 2} | PART),
    "DFlash from its anchor": (block_by_speculators("DFlash"), "dflash", {"from_anchor": True}),
    "DFlash with a causal window": (block_by_speculators("DFlash"), "dflash", LONG),
    "DFlash with a window of blocks": (block_by_speculators("DFlash"), "dflash", LONG | {"window_non_causal": True}),
    "DSpark": (block_by_speculators("DSpark"), "dspark", {"layers": 2} | PART),
    "DSpark, gated, by masks alone": (
        block_by_speculators("DSpark"),
        "dspark",
        {"markov": "gated", "from_anchor": False},
    ),
    "DSpark, recurrent": (block_by_speculators("DSpark"), "dspark", {"markov": "rnn"} | PART),
    "EAGLE-3": (eagle3_by_speculators, "eagle3", PART),
    "EAGLE-3 of the target's residual": (eagle3_by_speculators, "eagle3", {"norm_before_residual": True}),
    "EAGLE-3 with one norm": (eagle3_by_speculators, "eagle3", {"norms": "one"} | PART),
    "EAGLE-3.1": (eagle3_by_speculators, "eagle3", {"norms": "each", "norm_output": True}),
    "P-EAGLE": (peagle_by_speculators, "peagle", {"layers": 2, "own_embeddings": True} | PART),
    "P-EAGLE with a norm each": (peagle_by_speculators, "peagle", {"norms": "each"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_candidates_are_those_of_the_makers_code(case: str, settings: dict, tmp_path: Path, monkeypatch):
    makers, kind, changes = CASES[case]
    target, head = target_of(), random_head(kind, **changes)
    draft = loaded(head, tmp_path / "head", target)
    folder = write(head, tmp_path / "head")
    if makers is not by_dflash:
        draft.save_pretrained(folder := tmp_path / "saved")
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    watch = watched(strategy, head, target)
    scores = makers(folder, head, target.get_input_embeddings().weight, target.get_output_embeddings())
    monkeypatch.setattr(watch, "logits", lambda text, states, drafted: scores(list(text), states, drafted).double())
    with torch.no_grad():
        target.generate(**prompts(3), **settings | {"max_new_tokens": 12}, custom_generate=strategy)
    watch.check(40)
