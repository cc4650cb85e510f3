"""The host's contract, as in test_host_contract.py: its outputs, caches and first forwards."""

from inspect import signature

import pytest
import torch
from tiny import Forwards, prompts, tiny
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, utils

from hf_specx.models.slots import CACHE, SlotCache


OUTPUTS = {
    GenerateDecoderOnlyOutput: f"sequences scores logits attentions hidden_states {CACHE}",
    GenerateEncoderDecoderOutput: f"""
        sequences scores logits encoder_attentions encoder_hidden_states decoder_attentions cross_attentions
        decoder_hidden_states {CACHE}
    """,
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_fields_of_outputs(output: type):
    message = f"engine: {output.__name__} has other fields, to be filled as stock fills them"
    assert list(signature(output).parameters) == OUTPUTS[output].split(), message
    result = output(sequences=torch.zeros(1, 1))
    result.speculation_report = "mine"
    assert list(result) == ["sequences"], "engine: an attribute of an output has become an item of it"


def test_images_are_dropped_after_the_prompt():
    names = getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    assert {"pixel_values", "inputs_embeds"} & set(names), "models: the list of inputs for the prompt moved"


def states(tokens: int, first: int = 0) -> torch.Tensor:
    """Keys [2, 1, tokens, 4] that say which token they are of."""
    return torch.arange(first, first + tokens).float()[:, None].expand(2, 1, tokens, 4)


def test_what_a_layer_of_a_cache_has_to_do():
    needed = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    found = cache_utils.CacheLayerMixin.__abstractmethods__
    assert found == needed, f"models: SlotLayer has to do {found ^ needed}"
    made = []
    cache = Cache(layer_class_to_replicate=lambda: made.append(1) or DynamicLayer())
    cache.update(states(3), states(3), 0)
    cache.update(states(3), states(3), 1)
    assert len(made) == len(cache.layers) == 2, "models: layers are not made as a model asks for them"
    both = EncoderDecoderCache(SlotCache(), DynamicCache())
    assert isinstance(both.self_attention_cache, SlotCache), "models: with_slots puts a SlotCache in a pair"


def test_the_hosts_own_layers():
    cache = DynamicCache()
    cache.update(states(5), states(5), 0)
    assert type(cache.layers[0]) is DynamicLayer, "models: a cache without a config has other layers"
    assert cache.layers[0].keys.shape == (2, 1, 5, 4), "models: keys are not [B, H, L, D]"
    cache.layers[0].crop(-2)
    assert cache.get_seq_length() == 3, "models: a negative number crops so many tokens"
    cache.reorder_cache(torch.tensor([1]))
    assert cache.layers[0].keys.shape == (1, 1, 3, 4), "models: reorder_cache selects rows"
    assert DynamicCache().get_seq_length() == 0, "models: an empty cache has no length"
    kinds = [type(x) for x in DynamicCache(config=tiny("qwen2").config).layers]
    assert kinds == [DynamicLayer, DynamicSlidingWindowLayer], "models: layers by config.layer_types"


def test_a_window_that_records_its_past_goes_back():
    """From 5.23 on it shows what its mask has, 5.17 all that it recorded, until it is cropped."""
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.update(states(6), states(6))
    assert layer.keys.shape[2] == 3, "models: a full window keeps the last of its columns only"
    assert layer.sliding_window == 4, "models: where a window says how wide it is"
    layer.activate_past_recording()
    extent, offset = layer.get_mask_sizes(2)
    keys, _ = layer.update(states(2, 6), states(2, 6))
    assert (extent, offset) == (5, 3), "models: the mask of a window has other sizes"
    assert keys[0, 0, -extent:, 0].tolist() == [3, 4, 5, 6, 7], "models: a window shows other columns"
    layer.crop(-1)
    assert layer.get_seq_length() == 7, "models: a window counts its tokens otherwise"
    assert layer.keys[0, 0, :, 0].tolist() == [4, 5, 6], "models: a window is cropped to other columns"


def test_states_that_cannot_be_cropped():
    layer = LinearAttentionLayer()
    for name in ("conv_states", "recurrent_states", "is_recurrent_states_initialized"):
        assert isinstance(getattr(layer, name), dict), f"models: {name} is no dict by number"
    layer.update_recurrent_state(torch.ones(2, 3))
    assert layer.is_recurrent_states_initialized == {0: True}, "models: how a state is known to be there"
    cache = Cache(layers=[layer])
    cache.reorder_cache(torch.tensor([1]))
    assert layer.recurrent_states[0].shape == (1, 3), "models: rows of states are selected"
    assert callable(Cache.batch_select_indices), "models: how a model's own cache selects rows"
    mixer = tiny("mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=1, expand=2).backbone.layers[0].mixer
    assert len(mixer.time_step_limit) == 2, "models: Mamba-2 has its limits elsewhere"


def test_the_first_forward_and_the_next():
    """`_prefill` feeds what the cache lacks; then `next_sequence_length` says how many last tokens are fed."""
    model, ids = tiny(), prompts(2)["input_ids"]
    given = {"attention_mask": torch.ones_like(ids), CACHE: DynamicCache(), "use_cache": True}
    config = GenerationConfig()
    with Forwards(model) as forwards:
        model._prefill(ids[:, :7], config, given | {"attention_mask": torch.ones(2, 7)})
        output = model._prefill(ids, config, given)
    assert forwards.lengths == [7, 4], "models: a cache that was begun is continued otherwise"
    assert output.past_key_values.get_seq_length() == 11, "models: what _prefill returns"
    later = torch.nn.functional.pad(ids, (0, 2))
    inputs = model.prepare_inputs_for_generation(later, next_sequence_length=2, is_first_iteration=False, **given)
    assert inputs["input_ids"].shape == (2, 2), "models: next_sequence_length is the number of tokens"
    assert inputs[CACHE] is given[CACHE]


def test_tables_that_number_tokens_by_the_slots_before_them():
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    tables = [m for m in tiny("opt", **sizes).modules() if f"{CACHE}_length" in signature(m.forward).parameters]
    assert len(tables) == 1, "models: position tables are told their first slot by another name"
