"""What the target says of a text that is trained on again: without another forward, and the same in any order."""

import pytest
import torch
from counting import counting
from tiny import tiny
from training_cases import models, same, some_prompts, trained, weights

from hf_specx.training.reading import Reader, logits_where_written
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.remembered import Remembered
from hf_specx.training.texts import Phases, Writer


CPU = torch.device("cpu")
PLAIN, PROMPTS_TOO = Reader(), Reader(learn_from_prompts=True)


def some_phases(folder, target) -> Phases:
    """Ten texts of two phases, in batches of at most two."""
    recipe = TrainingRecipe(max_new_tokens=6, texts_per_phase=5, batch_size=2)
    phases = Phases(Writer(target, models()[1], recipe, folder), some_prompts(10))
    phases.begin(1, lambda done, total: None)
    return phases


def batch_of(phases: Phases, numbers: list[int], reader: Reader = PLAIN) -> dict[str, torch.Tensor]:
    """The texts of these numbers, as the Trainer gives them."""
    return reader.collate([phases.text(number) for number in numbers]) | {"numbers": torch.tensor(numbers)}


@pytest.mark.parametrize("reader", [PLAIN, PROMPTS_TOO], ids=["plain", "prompts too"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma2", "granite"])
def test_logits_are_those_of_the_target(tmp_path, model_type: str, reader: Reader):
    """Also those of Gemma 2, which are capped, and of Granite, which are scaled: they are not remembered."""
    capped = {"gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 3.0}}
    target = tiny(model_type, **capped.get(model_type, {}))
    phases = some_phases(tmp_path, target)
    remembered = Remembered(target, phases, reader)
    for numbers in ([3, 8], [3, 4], [9, 0, 3]):
        batch = batch_of(phases, numbers, reader)
        with torch.no_grad():
            plain = logits_where_written(target, CPU, batch)
        torch.testing.assert_close(remembered.logits(batch), plain, atol=1e-4, rtol=1e-4)
    assert bool(remembered.states) == (model_type not in capped)


def test_each_text_is_read_once_with_its_neighbours(tmp_path):
    target = models()[0]
    phases = some_phases(tmp_path, target)
    remembered, batch = Remembered(target, phases, PLAIN), batch_of(phases, [2, 4, 7])
    with counting(target) as calls:
        first = remembered.logits(batch)
        assert len(calls) == 3
        assert sorted(remembered.states) == [2, 3, 4, 7, 8]
        assert torch.equal(remembered.logits(batch), first)
        assert len(calls) == 3


def test_what_is_remembered_does_not_depend_on_the_order(tmp_path):
    target = models()[0]
    phases = some_phases(tmp_path, target)
    one, other = (Remembered(target, phases, PLAIN) for _ in range(2))
    for number in range(10):
        one.logits(batch_of(phases, [number]))
        other.logits(batch_of(phases, [9 - number, 3]))
    assert all(torch.equal(one.states[number], other.states[number]) for number in range(10))


def test_states_of_a_phase_lie_in_one_block(tmp_path):
    """Not in hundreds of small tensors, between which large ones are freed: the host's memory grew by far more."""
    target = models()[0]
    phases = some_phases(tmp_path, target)
    remembered = Remembered(target, phases, PLAIN)
    remembered.logits(batch_of(phases, list(range(10))))
    blocks = [states.untyped_storage().data_ptr() for _, states in sorted(remembered.states.items())]
    assert blocks == [blocks[0]] * 5 + [blocks[5]] * 5
    assert blocks[0] != blocks[5]


def test_texts_beyond_the_room_are_read_anew(tmp_path):
    target = models()[0]
    phases = some_phases(tmp_path, target)
    room = 3 * phases.recipe.max_new_tokens * target.config.hidden_size * 4
    remembered = Remembered(target, phases, PLAIN, room)
    for numbers in ([9, 1], [0, 1], [2, 3]):
        batch = batch_of(phases, numbers)
        with torch.no_grad():
            plain = logits_where_written(target, CPU, batch)
        torch.testing.assert_close(remembered.logits(batch), plain, atol=1e-5, rtol=1e-5)
    assert sorted(remembered.states) == [0, 1, 2]
    assert sum(block.nbytes for block in remembered.blocks.values()) == room


def test_a_training_is_the_same_without(monkeypatch):
    """But for rounding, which other neighbours in a forward change."""
    with_it = trained()
    monkeypatch.setattr("hf_specx.training.trainer.REMEMBERED_BYTES", 0)
    without = trained()
    assert with_it.alphas == pytest.approx(without.alphas, abs=1e-4)
    assert not same(weights(with_it.pair.draft), weights(models()[1]))
