"""How fast a target is with a trained draft, on this machine."""

from collections.abc import Callable, Sequence

from hf_specx.bench.inputs import Inputs
from hf_specx.bench.study import Study
from hf_specx.bench.tune import Loaded, LoadedDraft, measure_draft
from hf_specx.common.devices import execution_device
from hf_specx.common.padding import padded_rows
from hf_specx.pair_files.facts import model_facts
from hf_specx.pairs.pair import DraftTargetPair

from .recipe import TrainingRecipe


PAIR_RUNS = 3  # of plain and of speculative generation at each batch size


def measure_pair(
    pair: DraftTargetPair,
    prompts: Sequence[list[int]],
    batches: Sequence[int],
    recipe: TrainingRecipe,
    command: str,
    advance: Callable[[int], object],
) -> None:
    """Put measurements, costs and a number of drafts into the pair's config, as `specx tune` does.

    Args:
        pair: with a draft model.
        prompts: token ids, repeated where they are not enough.
        batches: sizes of the batches.
        recipe: how text is sampled.
        command: what the measurements say that they were made by.
        advance: called after each generation with how many there are in all.
    """
    options, runs = recipe.generate_options, range(PAIR_RUNS)
    study = Study(batches=batches, options=options, repeats=PAIR_RUNS, seed=recipe.seed, command=command)
    own, trained = pair.models
    target = Loaded(own, pair.tokenizer, model_facts(own))
    draft = LoadedDraft(trained, pair.draft_tokenizer, model_facts(trained))
    inputs = {rows: [_batch(pair, prompts, rows, run) for run in runs] for rows in batches}
    total = study.learning + 2 * (PAIR_RUNS + 1) * len(batches)
    measure_draft(target, draft, inputs, study, pair.config, lambda: advance(total))
    pair.strategy = pair._strategy()


def _batch(pair: DraftTargetPair, prompts: Sequence[list[int]], rows: int, run: int) -> Inputs:
    """The inputs of a run, padded on the left."""
    taken = [prompts[(run * rows + row) % len(prompts)] for row in range(rows)]
    padded = padded_rows(taken, "left", pair.tokenizer)
    return {name: tensor.to(execution_device(pair.target)) for name, tensor in padded.items()}
