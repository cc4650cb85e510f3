"""`distill`: what it makes of a draft, what it leaves alone, and what it refuses."""

import copy
import json
import random
from contextlib import closing
from importlib import import_module
from pathlib import Path

import numpy
import pytest
import torch
from accelerate import cpu_offload
from tiny import tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from training_cases import QUICK, models, report_of, same, silent, some_prompts, trained, weights
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from zoo import build

from hf_specx import DraftTargetPair, distill
from hf_specx.common.drafts import NEW_HEADS
from hf_specx.hub.cards import render
from hf_specx.hub.publish import save
from hf_specx.training import trainer
from hf_specx.training.draft import ModelDraft
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.trainer import training_arguments


@pytest.mark.parametrize("first", ["a draft", "exit:1"])
def test_models_and_random_numbers_are_left_as_they_were(first: str):
    target, draft = models()
    before = weights(target), weights(draft)
    configs = [copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict())) for model in (target, draft)]
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    start, quick = draft if first == "a draft" else first, QUICK | {"phases": 1}
    result = distill(target, start, some_prompts(), progress=silent, **quick)
    assert same(weights(target), before[0])
    assert same(weights(draft), before[1])
    assert not same(weights(result.pair.draft), before[1])
    assert result.pair.target is target
    for model, config in zip((target, draft), configs, strict=True):
        assert (model.config.to_dict(), model.generation_config.to_dict()) == config
        assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
        assert not model.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


def test_reported_alpha_is_that_of_generating():
    """On the prompts that it is reported on, under token verification: Σ min(p, q) at the judged positions.

    Both are means over some 2500 positions, of texts of their own; the standard error of each is about 0.005, and they
    differ by more than 0.03 once in 1e4.
    """
    held_out = some_prompts(80, seed=1)
    result = trained(held_out=held_out, max_new_tokens=32, phases=2)
    report = report_of(result, held_out[1::2] * 2)
    assert report.alpha == pytest.approx(result.after.value, abs=0.03)
    assert report.alpha > result.before.high


def test_what_is_not_said_is_as_the_target_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[TrainingRecipe] = []
    monkeypatch.setitem(distill.__globals__, "make_learner", lambda *arguments: seen.append(arguments[2]) or 1 / 0)
    target, draft = models()
    config = target.generation_config
    for options in ({"top_k": None}, {"do_sample": False}, {"temperature": 0.5, "max_new_tokens": 3}):
        config.do_sample, config.temperature, config.top_k, config.max_new_tokens = True, 0.7, 9, 12
        with pytest.raises(ZeroDivisionError):
            distill(target, draft, some_prompts(), **options)
    for kind in NEW_HEADS:
        with pytest.raises(ZeroDivisionError):
            distill(target, kind, some_prompts())
        assert seen.pop().passes == 32  # of cheap steps
    config.do_sample, options = False, {"phases": 1, "passes": 1, "texts_per_phase": 8, "seed": 0, "bf16": False}
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    tokens = torch.arange(500) % 48
    with pytest.raises(ZeroDivisionError):  # the embedded pair samples, whatever its target's config says
        import_module("train_pair").distil_draft(target, "layers:1", tokens, tokens, tmp_path, **options)
    settings = [(x.do_sample, x.temperature, x.top_p, x.top_k, x.max_new_tokens) for x in seen]
    assert settings.pop()[:4] == (True, 1.0, 1.0, 0)
    assert settings == [(True, 0.7, 1.0, 9, 12), (False, 1.0, 1.0, 0, 12), (True, 0.5, 1.0, 9, 3)]


def test_it_stops_when_alpha_no_longer_rises():
    """A learning rate that makes the draft infinite: two phases show it, and the first draft is returned."""
    target, draft = models()
    result = trained(target=target, draft=draft, learning_rate=1e30, phases=9, patience=2)
    assert len(result.alphas) == 3
    assert (result.steps, result.pair.draft) == (0, draft)
    assert result.gain == (0, 0, 0)
    assert "No phase was better" in result.pair.config.notes


def test_the_best_phase_is_taken(monkeypatch, tmp_path):
    """Of three phases the second: what is returned has its α on the texts that decide; also from a moved folder."""
    expected, taken = [0.4, 0.5, 0.7, 0.6], []
    alphas = iter([*expected, expected[0]])
    monkeypatch.setattr("hf_specx.training.distill.alpha", lambda sums: next(alphas))

    class Note(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            taken.append(weights(model))

    result = trained(callbacks=[Note()], folder=tmp_path / "here")
    assert result.alphas == expected
    assert same(weights(result.pair.draft), taken[1])
    again = trained(folder=(tmp_path / "here").rename(tmp_path / "there"))
    assert again.alphas == expected
    assert same(weights(again.pair.draft), taken[1])


def test_accumulated_batches_are_one_batch():
    """8 texts at once, or 4 times 2: the mean is over all of their tokens, however long each text is."""
    ends = {"target": tiny(initializer_range=0.2, eos_token_id=list(range(1, 5)))}
    accumulated = TrainingArguments(gradient_accumulation_steps=4)
    whole = trained(**ends, phases=1)
    parts = trained(**ends, phases=1, batch_size=2, training=accumulated)
    assert whole.steps == parts.steps == 4
    for name, weight in weights(whole.pair.draft).items():
        torch.testing.assert_close(parts.pair.draft.state_dict()[name], weight, atol=1e-5, rtol=1e-3)


def test_a_pair_with_its_card_and_speed(tmp_path):
    """In half precision; the draft has more pads behind the same tokens, as those of Qwen.

    No folder of this machine is in it: neither the draft's nor those of the command and of the settings.
    """
    target, draft = (model.to(torch.bfloat16) for model in (tiny(vocab_size=280), tiny(vocab_size=288, seed=1)))
    draft.save_pretrained(tmp_path / "my draft")
    draft.name_or_path = str(tmp_path / "my draft")
    texts = [f"{text} {number}" for text in TEXTS for number in range(10)]
    options = dict.fromkeys(("tokenizer", "draft_tokenizer"), tiny_tokenizer())
    options |= {"training": {"run_name": str(tmp_path / "my run")}, "command": f"specx distill '{tmp_path}/a b' c"}
    result = trained(target=target, draft=draft, prompts=texts, phases=1, **options)
    for batches in ((1,), (1, 2)):  # the second time in place of the first
        result.measure(batches, "specx distill a b", seconds=0)
    assert [m.batch for m in result.pair.config.measurements] == [1, 2]
    assert [m.turns for m in result.pair.config.measurements] == [8, 8]
    assert result.pair.config.measurements[1].prompts == len(result.split.test)  # all that decided nothing
    assert (result.pair.draft.dtype, result.pair.draft.config.vocab_size) == (torch.bfloat16, 288)
    result.pair.save_pretrained(tmp_path / "pair")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert same(weights(loaded.draft), weights(result.pair.draft))
    assert loaded.config.prompts == []
    card = render(loaded.config, "pair")
    figures = map(str, (result.before, result.after, result.gain))
    shown = (*figures, '"loss": "jsd"', "24 prompts", "`my draft`", "specx distill 'a b' c")
    assert [text for text in shown if text not in card] == []
    assert tmp_path.name not in card


@pytest.mark.parametrize("form", ["dict", "arguments"])
def test_a_token_is_never_written(tmp_path, form: str):
    """Neither into the card, nor beside the checkpoints, nor into what the command is said to have been."""
    token, arguments = "hf_SECRET", {"hub_token": "hf_SECRET", "report_to": "none"}
    training = arguments if form == "dict" else TrainingArguments(output_dir=str(tmp_path), **arguments)
    command = f"specx distill a b --set 'training={json.dumps(arguments)}'"
    result = trained(phases=1, training=training, folder=tmp_path / "training", command=command)
    result.measure((1,), command)
    result.pair.save_pretrained(tmp_path / "pair")
    save(result.pair, tmp_path / "written", with_code=True)
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.name == "training_args.bin" for path in texts)
    assert [path for path, content in texts.items() if token.encode() in content] == []
    assert '"hub_token": "<hidden>"' in result.pair.config.notes
    assert result.recipe.training["hub_token"] == token
    again = trained(phases=1, training=training, folder=tmp_path / "training")  # it goes on with what is there
    assert again.alphas == result.alphas


WRONG = {
    "prompts has no prompts": {"prompts": []},
    "prompt 2 of prompts has no tokens": {"prompts": [[1, 2], []]},
    "prompt 1 of prompts is 1;": {"prompts": [1, 2]},
    "prompts='text'": {"prompts": "text"},
    "no tokenizer": {"prompts": ["text"]},
    r"\[1, 'a'\]": {"prompts": [[1, "a"]]},
    "128 positions": {"prompts": [[1] * 120]},
    "id 48": {"prompts": [[48]]},
    "too few prompts": {"prompts": some_prompts(3)},
    "held_out=1.5": {"held_out": 1.5},
    "draft='org/model'": {"draft": "org/model"},
    "layers=2": {"draft": "layers:2"},
    "48 tokens and the draft 50": {"draft": tiny(vocab_size=50)},
    "tokenizers differ": {"tokenizer": tiny_tokenizer(), "draft_tokenizer": tiny_tokenizer(["other words"])},
    "nonsense": {"training": {"nonsense": 1}},
    "gradient_checkpointing": {"draft": "eagle3", "training": {"gradient_checkpointing": True}},
    "lora=4": {"draft": "eagle3", "lora": 4},
    "encoder-decoder": {"target": "t5"},
    "loss='kl'": {"loss": "kl"},
    "do_sample=False": {"do_sample": False, "top_p": 0.9},
    "batch_size=2.5": {"batch_size": 2.5},
    "seed=4294967296": {"seed": 2**32},
    "learn_from_prompts='yes'": {"learn_from_prompts": "yes"},
    "lora=0": {"lora": 0},
    "learning_rate='1e-3'": {"learning_rate": "1e-3"},
    "training=3": {"training": 3},
    "max_steps": {"training": TrainingArguments(max_steps=5)},
    "fsdp": {"training": {"fsdp": "full_shard"}},
    "did you mean 'phases'": {"phasez": 3},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, message: str):
    options = {"folder": tmp_path / "new", "progress": pytest.fail} | WRONG[message]
    if options.get("target") == "t5":
        options["target"] = build("seq2seq", "t5")
    with pytest.raises((ValueError, TypeError), match=message):
        trained(**options)
    assert not (tmp_path / "new").exists()


def test_a_draft_on_the_cpu_is_trained_there(tmp_path, monkeypatch):
    """Also where there is an accelerator; and in its own precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = training_arguments(ModelDraft(tiny(), tiny(), TrainingRecipe()), tmp_path, 1)
    assert (args.device.type, args.bf16) == ("cpu", False)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launch_that_shards_models(monkeypatch, name: str):
    """Refused before transformers makes its arguments, which change what every later model is loaded by."""
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match="accelerate launch"):
        trained(progress=pytest.fail)
    assert not is_deepspeed_zero3_enabled()


def test_an_offloaded_target():
    """Its weights are on the host between forwards."""
    target = tiny(initializer_range=0.2)
    cpu_offload(target, torch.device("cpu"))
    result, plain = trained(target=target, phases=1), trained(phases=1)
    assert result.alphas == pytest.approx(plain.alphas, abs=1e-4)
    with pytest.raises(ValueError, match="offloaded"):
        trained(target=target, draft="layers:1")


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    with closing(trainer.Bar()) as bar:
        bar("writing", 1, 3)  # too early for one
        monkeypatch.setattr(bar, "next_line", 0.0)
        for number in (2, 3):
            bar("writing", number, 3)
    assert capsys.readouterr().err == "writing: 2 of 3\n"
