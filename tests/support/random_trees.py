"""A draft that proposes random trees, in which the text of plain `generate` is planted up to a random depth."""

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter


class RandomTrees(Drafter):
    """Random parents and tokens; on one branch the tokens of `texts`, at random places among the others.

    Args:
        texts: of each row the emitted tokens of plain `generate`; of requests by their prompts.
        vocab_size: of the target.
        nodes: of a row, at most.
        planted: the chance that a branch goes on with the right token.
        chains: the chance that a row has a chain.
    """

    proposes_trees = True

    def __init__(
        self,
        texts: dict[Any, list[int]],
        vocab_size: int,
        seed: int = 0,
        nodes: int = 9,
        planted: float = 0.8,
        chains: float = 0.1,
    ):
        self.texts, self.vocab_size, self.nodes, self.planted, self.chains = texts, vocab_size, nodes, planted, chains
        self.random = random.Random(seed)

    def bind(self, target: PreTrainedModel) -> "RandomTrees":
        return self

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        tokens, parents = [], []
        for row, length in zip(batch.rows, lengths, strict=True):
            number = self.random.randint(0, self.nodes) if length else 0
            emitted = batch.row_states[row].emitted_ids
            key = tuple(batch.row(row)[: batch.row_states[row].prompt_length].tolist())
            rest = self.texts[key][len(emitted) :]
            of_row, follows = [], []
            planted = {-1: 0}  # nodes that the text goes through, with how many of its tokens are there
            is_chain = self.random.random() < self.chains
            for node in range(number):
                goes_on = [place for place in planted if planted[place] == len(planted) - 1]
                parent = node - 1 if is_chain else self.random.randrange(-1, node)
                if not is_chain and self.random.random() < self.planted:
                    parent = goes_on[0]  # more often there, so that walks go deep
                token = self.random.randrange(self.vocab_size)
                if parent in goes_on and len(planted) <= len(rest) and self.random.random() < self.planted:
                    token = rest[planted[parent]]
                    planted[node] = planted[parent] + 1
                of_row.append(token)
                follows.append(parent)
            tokens.append(of_row)
            parents.append(tuple(follows))
        numbers = list(map(len, tokens))
        most = max(numbers)
        filled = torch.tensor([[*of_row, *[0] * (most - len(of_row))] for of_row in tokens], dtype=torch.int64)
        return Draft(filled.to(batch.ids).view(len(tokens), most), numbers, None, "random trees", parents=parents)


def emitted_texts(inputs: dict[str, torch.Tensor], text: torch.Tensor) -> dict[Any, list[int]]:
    """By the prompt of each row what follows it in text [B, L + N]."""
    ids, width = inputs["input_ids"].cpu(), inputs["input_ids"].shape[1]
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool().cpu()
    rows = zip(ids, mask, text.cpu(), strict=True)
    return {tuple(row[is_token].tolist()): whole[width:].tolist() for row, is_token, whole in rows}
