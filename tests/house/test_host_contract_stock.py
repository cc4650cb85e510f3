"""The host's contract, as in test_host_contract.py: how stock stops, samples and returns, its caches and masks."""

from inspect import signature

import pytest
import torch
from collectors import Collector
from tiny import VOCAB_SIZE, WINDOW, Forwards, prompts, tiny
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, logits_process, utils
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hf_specx.models.slots import CACHE, SlotCache


class Ends(StoppingCriteria):
    """Stops each row after so many columns, and notes what it was called with."""

    def __init__(self, *columns: int):
        self.columns, self.seen = torch.tensor(columns), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(tuple(input_ids.shape))
        return input_ids.shape[1] >= self.columns


def test_rows_that_are_stopped():
    """Without an end token they go on until the last one stops; with one they are padded."""
    model, inputs, ends = tiny(), prompts(2), Ends(13, 16)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=9)
    settings = {"do_sample": False, "max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([ends])}
    output = model.generate(**inputs, **settings)
    assert torch.equal(output, free[:, :16]), "sampling: rows that were stopped, without an end token"
    assert ends.seen == [(2, n) for n in range(12, 17)], "sampling: a criterion is called otherwise"
    unused = next(i for i in range(VOCAB_SIZE) if i not in free)
    output = model.generate(**inputs, **settings, eos_token_id=unused)
    assert output[0].tolist() == [*free[0, :13].tolist(), 0, 0, 0], "sampling: rows that ended are padded"
    late = StoppingCriteriaList([MaxLengthCriteria(5)])
    output = model.generate(**inputs, do_sample=False, max_new_tokens=9, stopping_criteria=late)
    assert output.shape == (2, 12), "sampling: a length that the prompt exceeds lets one token through"


@pytest.mark.parametrize("rows", [1, 3])
def test_multinomial_is_a_race(rows: int):
    probs = torch.randn(rows, 50, generator=torch.Generator().manual_seed(2)).softmax(-1)
    torch.manual_seed(5)
    drawn = torch.multinomial(probs, 1)[:, 0]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    raced = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    assert torch.equal(drawn, raced), "sampling: multinomial is not the race of p / Exp(1)"
    assert torch.equal(state, torch.get_rng_state()), "sampling: multinomial draws more than its noise"


class Note(logits_process.LogitsProcessor):
    def __init__(self):
        self.calls: list[tuple] = []

    def __call__(self, input_ids, scores):
        self.calls.append((tuple(input_ids.shape), scores.dtype, tuple(scores.shape)))
        return scores


def test_stock_draws_once_a_step_for_all_rows():
    """Finished rows included; the scores are float32 for any model, and processors see the text in stock's columns."""
    note, inputs = Note(), prompts(3)
    model = tiny().to(torch.bfloat16)
    ends = StoppingCriteriaList([Ends(12, 14, 16)])
    chosen = {"do_sample": True, "top_k": 0, "max_new_tokens": 9, "eos_token_id": VOCAB_SIZE - 1}
    torch.manual_seed(3)
    processor = logits_process.LogitsProcessorList([note])
    output = model.generate(**inputs, **chosen, stopping_criteria=ends, logits_processor=processor)
    state, steps = torch.get_rng_state(), output.shape[1] - 11
    expected = [((3, 11 + t), torch.float32, (3, VOCAB_SIZE)) for t in range(steps)]
    assert note.calls == expected, "sampling: stock calls them otherwise"
    torch.manual_seed(3)
    for _ in range(steps):
        torch.empty(3, VOCAB_SIZE).exponential_()
    assert torch.equal(state, torch.get_rng_state()), "sampling: stock draws otherwise than [B, V] once a step"


def test_what_stock_streams():
    stream = Collector()
    tiny().generate(**prompts(1), do_sample=False, max_new_tokens=3, streamer=stream)
    shapes = [tuple(value.shape) for value in stream.puts]
    assert shapes == [(1, 11), (1,), (1,), (1,)], "engine: stock streams in other shapes"
    assert stream.ends == 1, "engine: stock does not end a stream once"


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


def test_what_stock_returns():
    model, inputs = tiny(attn_implementation="eager"), prompts(2)
    wanted = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    settings = {"do_sample": False, "max_new_tokens": 4}
    plain = model.generate(**inputs, **settings)
    assert plain.shape == (2, 15)
    output = model.generate(**inputs, **settings, return_dict_in_generate=True, **dict.fromkeys(wanted, True))
    assert torch.equal(output.sequences, plain)
    message = "engine: the entries of dict outputs have other shapes"
    for name in ("scores", "logits"):
        assert [tuple(x.shape) for x in output[name]] == [(2, VOCAB_SIZE)] * 4, f"{message}: {name}"
        assert {x.dtype for x in output[name]} == {torch.float32}, f"{message}: {name}"
    hidden = [[tuple(x.shape) for x in step] for step in output.hidden_states]
    assert hidden == [[(2, 11, 32)] * 3] + [[(2, 1, 32)] * 3] * 3, f"{message}: hidden_states"
    attentions = [[tuple(x.shape) for x in step] for step in output.attentions]
    assert attentions == [[(2, 4, 11, 11)] * 2] + [[(2, 4, 1, 11 + t)] * 2 for t in (1, 2, 3)], message
    assert output.past_key_values.get_seq_length() == 14, "models: the returned cache has another length"


def test_a_config_of_the_user_comes_before_that_of_the_model():
    """And arguments of the call before both; what nobody says is the model's."""
    found = []

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        found.append(generation_config)
        return input_ids

    model = tiny()
    model.generation_config.update(top_p=0.5, top_k=7, temperature=0.3)
    config = GenerationConfig(top_p=0.6, temperature=0.4, max_new_tokens=3)
    model.generate(**prompts(1), generation_config=config, temperature=0.9, custom_generate=take)
    values = [found[0].temperature, found[0].top_p, found[0].top_k]
    assert values == [0.9, 0.6, 7], "engine: settings take precedence otherwise"
    assert config.temperature == 0.4, "engine: the user's config is changed"


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_masks_by_position(model_type: str, attention: str):
    """A 4D mask is taken as it is, bool by sdpa and additive by eager; one a kind of layer where there are several."""
    model, ids = tiny(model_type, attn_implementation=attention), prompts(2)["input_ids"]
    config = model.config.get_text_config(decoder=True)
    assert config._attn_implementation == attention, "models: where the attention is named"
    places = torch.arange(11)
    causal = places <= places[:, None]
    window = causal & (places > places[:, None] - WINDOW)
    masks = {"full_attention": causal, "sliding_attention": window}
    if attention == "eager":
        lowest = torch.finfo(torch.float32).min
        masks = {kind: torch.zeros(11, 11).masked_fill(~mask, lowest) for kind, mask in masks.items()}
    masks = {kind: mask.expand(2, 1, 11, 11) for kind, mask in masks.items()}
    kinds = set(getattr(config, "layer_types", None) or ())
    one = masks["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    mask = {kind: masks[kind] for kind in kinds} if kinds else one
    output = model(ids, attention_mask=mask, position_ids=places[None], logits_to_keep=2).logits
    expected = model(ids).logits[:, -2:]
    assert torch.allclose(output, expected, atol=1e-4), "models: masks by position are taken otherwise"


def test_tables_that_number_tokens_by_the_slots_before_them():
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    tables = [m for m in tiny("opt", **sizes).modules() if f"{CACHE}_length" in signature(m.forward).parameters]
    assert len(tables) == 1, "models: position tables are told their first slot by another name"
