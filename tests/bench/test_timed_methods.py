"""Methods to generate, by name: each gives the text of its method and leaves the models as they were."""

import pytest
import torch
from tiny import near, tiny
from transformers import CompileConfig

from hf_specx.bench import timed_methods
from hf_specx.bench.decoding_methods import OUR_KINDS, parse_method
from hf_specx.bench.timed_methods import TimedMethod


OPTIONS = {"do_sample": False, "max_new_tokens": 8}
INPUTS = {"input_ids": torch.tensor([[5, 9, 30, 7, 9]]), "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
MEANINGLESS = (
    "plain-5 assisted-auto assisted-5-compiled block block-0 block-5-6 greedy-5 exit-5 exit:2 exit:0-5 exit:-auto "
    "assisted: coupled-tree-5 coupled-5-tree coupled-5-tree-0 plain-tree-5 assisted-5-tree-5"
)
GREEDY = (
    "plain assisted assisted-3 assisted:1-2 lookup-3 exit:1-2 suffix-auto several-3 block-3 token-3 coupled-2-tree-6 "
)
GREEDY += "suffix-auto-tree-auto coupled-auto-tree-4-compiled"


def pair():
    target = tiny()
    return target, near(target, 0.05)


@pytest.mark.parametrize("name", ["", *MEANINGLESS.split()])
def test_names_that_mean_nothing(name):
    with pytest.raises(ValueError, match="unknown"):
        parse_method(name)


def test_candidates_branch_up_to_the_nodes_of_the_name():
    target, draft = pair()
    method = TimedMethod("coupled-2-tree-6", target, draft)
    method(INPUTS, OPTIONS | {"max_new_tokens": 24})
    assert max(record.nodes for row in method.report.history for record in row) == 6
    assert parse_method("coupled-2").tree is False
    assert parse_method("exit:1-auto-tree-auto").tree == "auto"


@pytest.mark.parametrize("name", GREEDY.split())
def test_all_give_plain_greedy_text(name):
    target, draft = pair()
    method = TimedMethod(name, target, draft)
    assert torch.equal(method(INPUTS, OPTIONS), target.generate(**INPUTS, **OPTIONS))
    assert (method.report is not None) == (parse_method(name).kind in OUR_KINDS)


def test_assisted_says_of_which_draft_transformers_takes_the_tokenizer_for_another():
    with pytest.raises(ValueError, match="scores 72 tokens and the target 64"):
        TimedMethod("assisted", tiny(vocab_size=64), tiny(vocab_size=72))(INPUTS, OPTIONS)


def test_assisted_drafts_as_many_as_it_is_told_and_the_draft_is_left_as_it_was(monkeypatch):
    """Whatever happens."""
    target, draft = pair()
    config, before, seen = draft.generation_config, draft.generation_config.to_dict(), []

    def fail(model, *args, **kwargs):
        settings = draft.generation_config
        seen.append((settings.num_assistant_tokens, settings.num_assistant_tokens_schedule))
        settings.assistant_confidence_threshold = 0.123  # as transformers does
        raise KeyError

    monkeypatch.setattr(type(target), "generate", fail)
    for name in ("assisted-3", "assisted"):
        with pytest.raises(KeyError):
            TimedMethod(name, target, draft)(INPUTS, OPTIONS)
    assert seen == [(3, "constant"), (config.num_assistant_tokens, config.num_assistant_tokens_schedule)]
    assert draft.generation_config is config
    assert config.to_dict() == before


def test_an_early_exit_that_fails_leaves_the_target_as_it_was():
    """transformers lowers the number of layers in its config."""
    target, seen = tiny(), []

    def fail(*_):
        seen.append(target.config.num_hidden_layers)
        if seen[-1] == 1:
            raise KeyError

    target.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        TimedMethod("assisted:1", target)(INPUTS, OPTIONS)
    assert target.config.num_hidden_layers == 2


def test_plain_compiled_compiles_or_fails(monkeypatch):
    """By the backend that only notes what it was given; what was not compiled is not called so."""
    graphs, (target, _) = [], pair()

    def backend(module, example_inputs):
        graphs.append(module)
        return module

    monkeypatch.setattr(
        timed_methods,
        "CompileConfig",
        lambda mode, dynamic: CompileConfig(backend=backend, mode=None, dynamic=dynamic),
    )
    output = TimedMethod("plain-compiled", target)(INPUTS, OPTIONS)
    torch.compiler.reset()
    assert graphs
    assert torch.equal(output, target.generate(**INPUTS, **OPTIONS))
    monkeypatch.setattr(type(target), "_valid_auto_compile_criteria", lambda *args: False)
    with pytest.raises(RuntimeError, match="compiled"):
        TimedMethod("plain-compiled", pair()[0])(INPUTS, OPTIONS)
