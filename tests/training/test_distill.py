"""`distill`: what it makes of a draft, what it leaves alone, and how an interrupted one goes on."""

import copy
import json
import random
import re
import shutil

import numpy
import pytest
import torch
from accelerate import cpu_offload
from other_tokens import PROMPTS, draft_of, target_of, tokenizer_of
from safetensors import SafetensorError
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from training_cases import QUICK, models, same, silent, some_prompts, trained, weights
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from zoo import build

import hf_specx
from hf_specx import DraftTargetPair, distill
from hf_specx.hub.cards import render
from hf_specx.training.checkpoints import COMPLETE
from hf_specx.training.losses import LOSSES
from hf_specx.training.progress import EVALUATED


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_raises_alpha(loss: str):
    result = trained(loss=loss)
    assert result.gain.low > 0
    assert result.after.value - result.before.value == pytest.approx(result.gain.value)
    assert result.pair.report is None


@pytest.mark.parametrize("first", ["a draft", "layers:1"])
def test_models_and_random_numbers_are_left_as_they_were(first: str):
    target, draft = models()
    before = weights(target), weights(draft)
    configs = [copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict())) for model in (target, draft)]
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    result = distill(target, draft if first == "a draft" else first, some_prompts(), progress=silent, **QUICK)
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
    apart = some_prompts(80, seed=1)
    result = trained(held_out=apart, max_new_tokens=32)
    strategy = hf_specx.SpeculativeDecoding(result.pair.draft, num_draft_tokens=1, verification="token")
    requests = [hf_specx.Request(ids, seed=number) for number, ids in enumerate(apart[1::2] * 2)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 32}
    list(strategy.generate_many(result.pair.target, requests, **options))
    assert strategy.report.alpha == pytest.approx(result.after.value, abs=0.03)
    assert strategy.report.alpha > result.before.high


def test_learning_from_prompts():
    """As the draft in the package did."""
    result = trained(learn_from_prompts=True)
    assert result.gain.low > 0
    assert "inside these prompts" in result.pair.config.notes


class Interrupt(TrainerCallback):
    """Ends the process, as far as a test can: in the middle of a phase, and as soon as anything is written."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def undisturbed():
    return trained(phases=4)


@pytest.mark.parametrize("steps", [[2], [6], [7, 14], [16]])
def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path, undisturbed, steps: list[int]):
    """In the first phase, after it, twice, and in the last step; also without the texts, which are written again."""
    for step in steps:
        with pytest.raises(KeyboardInterrupt):
            trained(phases=4, folder=tmp_path, callbacks=[Interrupt(step)])
        shutil.rmtree(tmp_path / "texts")
    again = trained(phases=4, folder=tmp_path)
    assert same(weights(again.pair.draft), weights(undisturbed.pair.draft))
    assert again.alphas == undisturbed.alphas
    assert again.after == undisturbed.after


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("kind", ["dropout", "lora"])
def test_what_else_an_interrupted_training_needs(tmp_path, kind: str):
    """The state of random numbers, and adapters."""
    if kind == "lora":
        pytest.importorskip("peft")
    drops = tiny("gpt2", initializer_range=0.2)
    given = {"lora": 4, "learning_rate": 2e-2} if kind == "lora" else {"target": drops, "draft": near(drops, 0.8)}
    undisturbed = trained(**given)
    assert undisturbed.steps > 4
    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, callbacks=[Interrupt(6)], **given)
    again = trained(folder=tmp_path, **given)
    assert again.alphas == undisturbed.alphas
    assert same(weights(again.pair.draft), weights(undisturbed.pair.draft))


def test_a_checkpoint_that_is_half_written_does_not_count(tmp_path, undisturbed):
    with pytest.raises(KeyboardInterrupt):
        trained(phases=4, folder=tmp_path, callbacks=[Interrupt(14)])
    last = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    (last / COMPLETE).unlink()
    (last / "trainer_state.json").write_text("{")
    again = trained(phases=4, folder=tmp_path)
    assert same(weights(again.pair.draft), weights(undisturbed.pair.draft))


def test_a_finished_training_is_not_trained_further(tmp_path):
    first = trained(folder=tmp_path)
    steps = []
    again = trained(folder=tmp_path, progress=lambda now: steps.append(now.doing))
    assert "training" not in steps
    assert same(weights(again.pair.draft), weights(first.pair.draft))
    assert (again.alphas, again.steps) == (first.alphas, first.steps)


def test_another_training_does_not_go_on_in_the_same_folder(tmp_path):
    trained(folder=tmp_path, phases=1)
    with pytest.raises(ValueError, match=r"other settings \(loss 'lk', now 'jsd'\); give the same ones to go on"):
        trained(folder=tmp_path, phases=1, loss="jsd")
    with pytest.raises(ValueError, match=r"other settings \(another prompts\)"):
        trained(folder=tmp_path, phases=1, prompts=some_prompts(seed=1))
    ends_otherwise = tiny(initializer_range=0.2)
    ends_otherwise.generation_config.eos_token_id = 7
    with pytest.raises(ValueError, match=r"other settings \(another target\)"):
        trained(folder=tmp_path, phases=1, target=ends_otherwise)
    shutil.rmtree(tmp_path / "texts")
    (tmp_path / "settings.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="has no training to go on with"):
        trained(folder=tmp_path, phases=1)


def test_a_folder_where_a_process_was_killed_at_once(tmp_path):
    """While it wrote its settings."""
    (tmp_path / "settings.part").write_text("{")
    assert trained(folder=tmp_path, phases=1).alphas


def test_settings_may_change_before_the_first_checkpoint(tmp_path):
    """As after an error that said what to lower: the texts are there already."""
    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, callbacks=[Interrupt(2)])
    doing = []
    result = trained(folder=tmp_path, batch_size=4, progress=lambda now: doing.append((now.doing, now.phase)))
    assert ("writing", 1) not in doing
    assert same(weights(result.pair.draft), weights(trained(batch_size=4).pair.draft))


@pytest.mark.parametrize("learning_rate", [5.0, 1e30], ids=["far off", "infinite"])
def test_it_stops_when_alpha_no_longer_rises(learning_rate: float):
    """A learning rate that destroys the draft: two phases are enough to see that, and the first draft is returned."""
    target, draft = models()
    result = trained(target=target, draft=draft, learning_rate=learning_rate, phases=9, patience=2)
    assert len(result.alphas) == 3
    assert (result.steps, result.pair.draft) == (0, draft)
    assert result.gain == (0, 0, 0)
    assert "no phase was better than the start" in str(result)
    assert "No phase was better" in result.pair.config.notes


def test_the_best_phase_is_taken(monkeypatch, tmp_path):
    """Of three phases the second: what is returned has its α on the texts that decide; also from a moved folder."""
    found = [0.4, 0.5, 0.7, 0.6]
    monkeypatch.setattr("hf_specx.training.trainer.alpha", lambda sums: found[len(seen)])
    monkeypatch.setattr("hf_specx.training.distill.alpha", lambda sums: found[0])
    seen, taken = [], []

    class Note(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            taken.append(weights(model))

    def progress(now):
        if now.doing == EVALUATED:
            seen.append(now.alpha)

    result = trained(progress=progress, callbacks=[Note()], folder=tmp_path / "here")
    assert result.alphas == found
    assert same(weights(result.pair.draft), taken[1])
    again = trained(folder=(tmp_path / "here").rename(tmp_path / "there"))
    assert again.alphas == found
    assert same(weights(again.pair.draft), taken[1])


def test_accumulated_batches_are_one_batch():
    """8 texts at once, or 4 times 2: the mean is over all of their tokens, however long each text is."""
    ends = {"target": tiny(initializer_range=0.2, eos_token_id=list(range(1, 5)))}
    whole = trained(**ends, phases=1)
    parts = trained(**ends, phases=1, batch_size=2, training={"gradient_accumulation_steps": 4})
    assert whole.steps == parts.steps == 4
    for name, weight in weights(whole.pair.draft).items():
        torch.testing.assert_close(parts.pair.draft.state_dict()[name], weight, atol=1e-5, rtol=1e-3)


def test_a_pair_with_its_card_and_speed(tmp_path):
    target, draft = (model.to(torch.bfloat16) for model in (tiny(vocab_size=280), tiny(vocab_size=280, seed=1)))
    tokenizer = tiny_tokenizer()
    texts = [f"{text} {number}" for text in TEXTS for number in range(10)]
    result = trained(
        target=target,
        draft=draft,
        prompts=texts,
        tokenizer=tokenizer,
        draft_tokenizer=tokenizer,
        phases=1,
        command="specx distill a b",
    )
    result.measure((1, 2), "specx distill a b")
    assert [m.batch for m in result.pair.config.measurements] == [1, 2]
    assert result.pair.config.measurements[0].command == "specx distill a b"
    assert result.pair.draft.dtype == torch.bfloat16
    result.pair.save_pretrained(tmp_path / "pair")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert same(weights(loaded.draft), weights(result.pair.draft))
    assert loaded.config.prompts == []
    card = render(loaded.config, "pair")
    for shown in (
        "How the draft was made",
        str(result.before),
        str(result.after),
        str(result.gain),
        "`lk`",
        "24 prompts",
    ):
        assert shown in card
    assert json.loads(json.dumps(result.to_dict()))["alphas"] == result.alphas


WRONG = {
    "prompts has no prompts": {"prompts": []},
    "prompt 2 of prompts is empty": {"prompts": [[1, 2], []]},
    "prompts='text' is no list of prompts": {"prompts": "text"},
    "prompts are texts and there is no tokenizer": {"prompts": ["text"]},
    r"prompt 1 of prompts is \[1, 'a'\]; give a string, or ints": {"prompts": [[1, "a"]]},
    "prompt 1 of prompts has 120 tokens, and with 12 new ones it is beyond the 128 positions": {
        "prompts": [[1] * 120]
    },
    "prompt 1 of prompts has the id 48, and LlamaForCausalLM has 48 tokens": {"prompts": [[48]]},
    "too few prompts: 1 to hold out .* and 2 to train on": {"prompts": some_prompts(3)},
    "held_out=1.5 is no share between 0 and 1": {"held_out": 1.5},
    "prompt 1 of held_out is empty": {"held_out": [[]]},
    "draft='org/model' is no model; load one": {"draft": "org/model"},
    "'layers:x' names no layers": {"draft": "layers:x"},
    "the target scores 48 tokens and the draft 50": {"draft": tiny(vocab_size=50)},
    "T5ForConditionalGeneration is an encoder-decoder": {"target": "t5"},
}


@pytest.mark.parametrize("told", WRONG)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, told: str):
    options = {"folder": tmp_path / "new", "progress": pytest.fail} | WRONG[told]
    if options.get("target") == "t5":
        options["target"] = build("seq2seq", "t5")
    with pytest.raises(ValueError, match=told):
        trained(**options)
    assert not (tmp_path / "new").exists()


KIND, OTHER = "byte-level", "byte-level, other merges"


def other_tokenizer(kind: str = OTHER, **options):
    """A short training of a draft whose tokens are not the target's."""
    given = {"target": target_of(KIND), "draft": draft_of(KIND, kind, noise=1.0), "tokenizer": tokenizer_of(KIND)}
    given |= {"draft_tokenizer": tokenizer_of(kind), "prompts": [f"{text} {n}" for text in PROMPTS for n in range(8)]}
    return trained(**given | options)


def test_a_draft_with_another_tokenizer(tmp_path):
    """It learns what it proposes where text is generated, and α is that of generating, as in the test above."""
    result = other_tokenizer(max_new_tokens=32, held_out=0.5)
    assert result.gain.low > 0.01
    options = {
        "verification": "token",
        "tokenizer": result.pair.tokenizer,
        "draft_tokenizer": result.pair.draft_tokenizer,
    }
    strategy = hf_specx.SpeculativeDecoding(result.pair.draft, num_draft_tokens=1, **options)
    requests = [hf_specx.Request(ids, seed=number) for number, ids in enumerate(result.split.test * 4)]
    list(strategy.generate_many(result.pair.target, requests, do_sample=True, top_k=0, max_new_tokens=32))
    assert strategy.report.alpha == pytest.approx(result.after.value, abs=0.03)
    result.pair.save_pretrained(tmp_path / "pair")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert loaded.draft_tokenizer.get_vocab() == tokenizer_of(OTHER).get_vocab()
    assert "learned to propose the tokens that both have" in loaded.config.notes


def test_an_interrupted_training_with_another_tokenizer(tmp_path):
    undisturbed = other_tokenizer(phases=2)
    with pytest.raises(KeyboardInterrupt):
        other_tokenizer(phases=2, folder=tmp_path, callbacks=[Interrupt(6)])
    assert same(weights(other_tokenizer(phases=2, folder=tmp_path).pair.draft), weights(undisturbed.pair.draft))
    with pytest.raises(ValueError, match=r"other settings \(another draft; another draft's tokenizer\)"):
        other_tokenizer("byte fallback", phases=2, folder=tmp_path)


def test_tokenizers_with_too_little_in_common(monkeypatch):
    monkeypatch.setattr("hf_specx.training.start.ENOUGH_COMMON", 0.8)
    told = "of the tokens of a sample text 75% are in both tokenizers, .* train one with at least 80% of them"
    with pytest.raises(ValueError, match=told):
        other_tokenizer("unigram")


ARGUMENTS = {
    "training={'nonsense': 1} is refused by TrainingArguments: got an unexpected keyword argument": {"nonsense": 1},
    "is refused by TrainingArguments: x is not a valid OptimizerNames": {"optim": "x"},
    "training=3 is no dict": 3,
    "{'gradient_accumulation_steps': 0} is not an int of 1 or more": {"gradient_accumulation_steps": 0},
}


@pytest.mark.parametrize("told", ARGUMENTS)
def test_arguments_that_transformers_does_not_take(tmp_path, told: str):
    with pytest.raises(ValueError, match=re.escape(told)):
        trained(folder=tmp_path / "new", progress=pytest.fail, training=ARGUMENTS[told])
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "new", "/proc/new"):
        with pytest.raises(
            ValueError, match="nothing can be written in .*; name another folder|needs about .* are free"
        ):
            trained(folder=folder, progress=pytest.fail)


def test_mixed_precision():
    """Which is rounding: nearly the same weights, also where the draft is in the precision that it is trained in."""
    result, mixed = trained(phases=1), trained(phases=1, training={"bf16": True})
    assert mixed.after.value == pytest.approx(result.after.value, abs=0.01)
    assert mixed.gain.low > 0
    assert not same(weights(mixed.pair.draft), weights(result.pair.draft))
    assert mixed.pair.draft.dtype == torch.float32


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launch_that_shards_models(monkeypatch, name: str):
    """Refused before transformers makes its arguments, which change what every later model is loaded by."""
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match="accelerate launch was told to shard models"):
        trained(progress=pytest.fail)
    assert not is_deepspeed_zero3_enabled()


def test_a_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(ValueError, match="needs about [0-9.]+ MB for checkpoints and the draft, and 0.0 MB are free"):
        trained(folder=tmp_path)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_a_disk_with_room_for_adapters_alone(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    free = 2 * models()[1].num_parameters() * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    with pytest.raises(ValueError, match="are free; make room"):
        trained(folder=tmp_path, phases=1)
    assert trained(folder=tmp_path, phases=1, lora=4).alphas


def test_an_offloaded_target():
    """Its weights are on the host between forwards."""
    target = tiny(initializer_range=0.2)
    cpu_offload(target, torch.device("cpu"))
    result, plain = trained(target=target, phases=1), trained(phases=1)
    assert result.alphas == pytest.approx(plain.alphas, abs=1e-4)
    with pytest.raises(ValueError, match="'layers:1': the target has weights that are offloaded"):
        trained(target=target, draft="layers:1")


class Fail(TrainerCallback):
    """Raises an error in the second step."""

    def __init__(self, error: Exception):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise self.error


ERRORS = {
    "memory is not enough with batch_size=8; lower it": torch.OutOfMemoryError("CUDA out of memory. Tried"),
    "memory is not enough.* A training with a checkpoint keeps": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    "is full; make room and start again: it goes on": OSError(28, "No space left on device"),
    "the disk of .* is full": SafetensorError("Error while serializing: I/O error: No space left on device"),
    "is full; make room": RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"),
}


@pytest.mark.parametrize("told", ERRORS)
def test_memory_or_disk_that_runs_out(told: str):
    with pytest.raises(ValueError, match=told):
        trained(callbacks=[Fail(ERRORS[told])])


def test_other_errors_pass():
    for error in (OSError("another"), RuntimeError("another")):
        with pytest.raises(type(error), match="another"):
            trained(callbacks=[Fail(error)])


def test_progress_of_a_training_that_goes_on(tmp_path):
    """The first line is of the phase that is over, not of the time before training."""
    found = trained(folder=tmp_path)
    seen = []
    trained(folder=tmp_path, progress=lambda now: seen.append(str(now)) if now.doing == EVALUATED else None)
    assert len(seen) == 1
    assert seen[0].startswith(f"phase 3 of 3, α {found.alphas[-1]:.3f}, ")


def test_progress():
    seen = []
    trained(progress=lambda now: seen.append((now.doing, now.phase, now.done, now.total)))
    assert seen[:8] == [("writing held-out texts", 0, number, 4) for number in (1, 2, 3, 4)] * 2
    assert [now for now in seen if now[0] == "training"] == [
        ("training", phase, step, 4) for phase in (1, 2, 3) for step in (1, 2, 3, 4)
    ]
    assert [now[1] for now in seen if now[0] == EVALUATED] == [0, 1, 2, 3]
    assert QUICK["texts_per_phase"] == sum(now[:2] == ("writing", 2) for now in seen)
