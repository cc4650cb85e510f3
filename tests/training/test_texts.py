"""Texts: those of plain `generate`, whatever the draft; which of them a phase has; how they are kept."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from counting import counting
from tiny import near, tiny
from training_cases import models, silent, some_prompts

from hf_specx.training.draft import ModelDraft
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.texts import Phases, Writer, seed_of, writer_digest


pytestmark = pytest.mark.usefixtures("draft_pays")


def writer(folder, noise: float = 0.1, **options) -> Writer:
    target, _ = models()
    recipe = TrainingRecipe(**{"max_new_tokens": 20, "texts_per_phase": 3} | options)
    return Writer(target, ModelDraft(target, near(target, noise), recipe), folder)


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_p": 0.9}, {"do_sample": False}], ids=str)
def test_texts_are_those_of_plain_generate(tmp_path, options):
    """Under each text's seed; they take fewer forwards than plain generate, which takes one for each token."""
    text_writer, prompts = writer(tmp_path, **options), some_prompts(6)
    text_writer.write("others", prompts)  # times the forwards
    with counting(text_writer.target) as forwards:
        texts = text_writer.write("some", prompts)
    assert len(forwards) < 20
    for number, text in enumerate(texts):
        torch.manual_seed(seed_of(0, "some", number))
        plain = text_writer.target.generate(torch.tensor([prompts[number]]), **text_writer.recipe.generate_options)
        assert text.prompt + text.new == plain[0].tolist()


def test_kept_texts_are_taken_only_for_what_they_were_made_of(tmp_path):
    first = writer(tmp_path)
    texts = first.write("some", some_prompts(3))
    again = writer(tmp_path)
    with counting(again.target) as forwards:
        assert again.write("some", some_prompts(3)) == texts
    assert forwards == []
    (tmp_path / "some.json").rename(tmp_path / "some.part")  # as where it was killed while it wrote
    assert again.write("some", some_prompts(3)) == texts
    for other in (writer(tmp_path, max_new_tokens=8), writer(tmp_path, seed=1)):
        assert other.write("some", some_prompts(3)) != texts
    assert first.write("some", some_prompts(4))[:3] == texts


def test_targets_that_write_other_texts():
    """By their precision, their weights, also offloaded ones, or how they generate; a name changes nothing."""
    half, named, ends = tiny().to(torch.bfloat16), tiny(), tiny()
    named.name_or_path, ends.generation_config.eos_token_id = "org/other", 7
    models = [half, copy.deepcopy(half).float(), tiny(), cpu_offload(tiny(seed=1), torch.device("cpu")), ends]
    assert len({writer_digest(model) for model in models}) == 5
    assert writer_digest(named) == writer_digest(cpu_offload(tiny(), torch.device("cpu"))) == writer_digest(tiny())


def test_a_phase_has_its_new_texts_and_others_of_before(tmp_path):
    """Each prompt is used once before any is used again."""
    announced, prompts = [], some_prompts(6)
    phases = Phases(writer(tmp_path, max_new_tokens=3, passes=3), prompts, announced.append)
    phases.start(0, silent)
    assert len(phases.order) == len(phases) == 9
    assert set(phases.order) == {0, 1, 2}
    phases.start(1, silent)
    assert {3, 4, 5} <= set(phases.order) <= set(range(6))
    assert announced == [phases.texts[:3], phases.texts[3:]]
    phases.start(3, silent)
    used = [text.prompt for text in phases.texts]
    assert sorted(used[:6]) == sorted(used[6:]) == sorted(prompts)
    assert used[:6] != used[6:]


def test_texts_are_learned_from_after_their_first_token_where_prompts_count_too(tmp_path):
    options = {"max_new_tokens": 3, "texts_per_phase": 2}
    plain = Phases(writer(tmp_path, learn_from_prompts=False, **options), some_prompts(7), silent)
    whole = Phases(writer(tmp_path, learn_from_prompts=True, **options), some_prompts(7), silent)
    for phases in (plain, whole):
        phases.start(0, silent)
    assert whole.texts == [(text.prompt[:1], text.prompt[1:] + text.new) for text in plain.texts]
