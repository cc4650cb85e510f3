"""What `return_dict_in_generate` returns: stock's entries up to the end of each row, and caches to go on with."""

import copy
import itertools
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import zoo
from all_pairs import each_value
from counting import reads_only
from criteria import RowSumIs
from plain import coupled
from tiny import VOCAB_SIZE, prompts, tiny
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import ModelOutput

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.models.slots import CACHE


NEW_TOKENS, WIDTH, ROWS = 14, 11, 4
MODES = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "top_k": 12, "temperature": 0.8}}
EVERYTHING = {"output_scores": True, "output_logits": True}
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
DECODERS = [(name, layout) for name in ("llama", "mistral", "gpt2") for layout in LAYOUTS]
PAIRS = [("t5", "padded"), ("t5", "lockstep"), ("bart", "padded"), ("bart", "lockstep")]
ALL = [*DECODERS, ("llama4_text", "ragged"), ("falcon_h1", "lockstep"), *PAIRS]


@cache
def model(model_type: str) -> PreTrainedModel:
    if model_type in ("llama", "mistral", "gpt2"):
        target = tiny(model_type)
    else:
        target = zoo.build("seq2seq" if model_type in ("t5", "bart") else "causal", model_type)
    target.set_attn_implementation("eager")
    return target


def generate(target: PreTrainedModel, call: dict, layout: str | None = None) -> ModelOutput:
    """By stock, or by us in a layout."""
    noise = 0.1 if target.config.is_encoder_decoder else 0.02
    strategy = None if layout is None else coupled(target, noise, num_draft_tokens=3, layout=layout)
    torch.manual_seed(3)
    return target.generate(**call, return_dict_in_generate=True, custom_generate=strategy)


def calls(target: PreTrainedModel, mode: str, ends: bool, **more) -> tuple[dict, list[int]]:
    """A call whose rows end at different steps, if they are to end, and the tokens that each row emits."""
    call = prompts(ROWS) | MODES[mode] | {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | more
    text = generate(target, call).sequences[:, -NEW_TOKENS:]
    if not ends:
        return call, [NEW_TOKENS] * ROWS
    counts: list[int] = []
    for tokens in itertools.combinations(text.unique().tolist(), 2):
        hits = torch.isin(text, torch.tensor(tokens)).tolist()
        first_hits = [row.index(True) + 1 if True in row else NEW_TOKENS for row in hits]
        if len(set(first_hits)) > len(set(counts)) and min(first_hits) > 1:
            counts, call["eos_token_id"] = first_hits, list(tokens)
    assert len(set(counts)) > 1
    return call, counts


def assert_entry(ours: torch.Tensor, stock: torch.Tensor, alive: list[bool], place: str) -> None:
    assert ours.shape == stock.shape, place
    assert ours.dtype == stock.dtype, place
    torch.testing.assert_close(ours[alive], stock[alive], rtol=1e-4, atol=1e-4, msg=lambda text: f"{place}: {text}")
    assert not ours[[not x for x in alive]].any(), place


def assert_like_stock(ours: ModelOutput, stock: ModelOutput, counts: list[int]) -> None:
    assert type(ours) is type(stock)
    assert torch.equal(ours.sequences, stock.sequences)
    assert ours.keys() - {CACHE} == stock.keys() - {CACHE}
    for name in stock.keys() - {"sequences", CACHE}:
        assert len(ours[name]) == len(stock[name]) == max(counts), name
        for step, (entry, expected) in enumerate(zip(ours[name], stock[name], strict=True)):
            assert_entry(entry, expected, [step < count for count in counts], f"{name}, step {step}")


@pytest.mark.parametrize(("case", "mode", "ends"), each_value(ALL, MODES, [False, True]))
def test_entries_are_those_of_stock(case: tuple[str, str], mode: str, ends: bool):
    model_type, layout = case
    target = model(model_type)
    call, counts = calls(target, mode, ends)
    call |= EVERYTHING
    output = generate(target, call, layout)
    assert_like_stock(output, generate(target, call), counts)
    assert output.speculation_report.emitted == sum(counts)
    assert output.speculation_report.accepted > 0


@pytest.mark.parametrize("layout", ["ragged", "padded", "lockstep"])
def test_gaps_in_a_mask_are_not_seen(layout: str):
    """Logits show what is too little for another token."""
    target = model("llama")
    call = calls(target, "coupled", ends=False)[0] | EVERYTHING
    call["attention_mask"] = call["attention_mask"].clone()
    call["attention_mask"][0, 4:9] = 0
    assert_like_stock(generate(target, call, layout), generate(target, call), [NEW_TOKENS] * ROWS)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_stopped_without_an_end_token_go_on(mode: str):
    """Until all are stopped, as in stock; what a row emitted behind that column does not count."""
    target = model("llama")
    call = calls(target, mode, ends=False, max_new_tokens=40)[0] | EVERYTHING | {"stopping_criteria": [RowSumIs()]}
    output, expected = generate(target, call, "ragged"), generate(target, call)
    columns = len(expected.scores)
    assert columns < 40
    assert_like_stock(output, expected, [columns] * ROWS)


def later(call: dict, text: torch.Tensor, counts: list[int], width: int) -> dict[str, torch.Tensor]:
    """The next turn: everything so far, in which the columns behind the end of a row are hidden, and five words."""
    words = torch.randint(1, VOCAB_SIZE, (ROWS, 5), generator=torch.Generator().manual_seed(3))
    emitted = torch.arange(text.shape[1] - width) < torch.tensor(counts)[:, None]
    mask = torch.cat([call["attention_mask"], emitted, torch.ones_like(words)], -1)
    return {"input_ids": torch.cat([text, words], -1), "attention_mask": mask}


def later_of_decoder(call: dict, text: torch.Tensor, counts: list[int]) -> dict:
    """`later`, of what the decoder of an encoder-decoder has written."""
    turn = later({"attention_mask": torch.ones(ROWS, 1)}, text, counts, 1)
    turn = {f"decoder_{name}": value for name, value in turn.items()} | {"max_new_tokens": NEW_TOKENS}
    return turn | {name: call[name] for name in ("input_ids", "attention_mask")}


@reads_only
def note_length(lengths: list[int], name: str, _, __, given: dict) -> None:
    lengths.append(given[name].shape[1])


def assert_continues(target: PreTrainedModel, turn: dict, past: DynamicCache | EncoderDecoderCache) -> None:
    """The next turn has the text that it has without this cache, by stock and by us, and reads the new words only."""
    name = "decoder_input_ids" if target.config.is_encoder_decoder else "input_ids"
    for mode in MODES.values():
        expected = generate(target, turn | mode).sequences
        for layout in (None, "auto"):
            lengths: list[int] = []
            handle = target.register_forward_pre_hook(partial(note_length, lengths, name), with_kwargs=True)
            output = generate(target, turn | mode | {CACHE: copy.deepcopy(past)}, layout)
            handle.remove()
            assert torch.equal(output.sequences, expected), layout
            assert lengths[0] == turn[name].shape[1] - past.get_seq_length(), layout


@pytest.mark.parametrize(("case", "ends"), each_value(DECODERS, [False, True]))
def test_the_cache_of_a_decoder_serves_the_next_turn(case: tuple[str, str], ends: bool):
    model_type, layout = case
    target = model(model_type)
    call, counts = calls(target, "coupled", ends)
    output, expected = generate(target, call, layout), generate(target, call)
    if (model_type, layout, ends) == ("mistral", "lockstep", True):  # its rows cannot be put together
        assert output.past_key_values is None
        return
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    turn = later(call, output.sequences, counts, WIDTH) | {"max_new_tokens": NEW_TOKENS}
    assert_continues(target, turn, output.past_key_values)


def peak_of(call: Callable[[], ModelOutput]) -> tuple[int, ModelOutput]:
    """The most bytes of tensors at once during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = call()
    events = profiler.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in sizes)), output


@pytest.mark.parametrize(
    ("layout", "case"), each_value(["ragged", "padded", "lockstep"], [(4, [29, 32, 38]), (1, None)])
)
def test_the_cache_is_not_there_twice(layout: str, case: tuple[int, list[int] | None]):
    """But for rows that leave before others, which are copied then, and again at the end, layer by layer."""
    rows, ends = case
    target = tiny(num_hidden_layers=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=1000)
    ids = torch.randint(1, VOCAB_SIZE, (rows, 400), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    call |= {"prefill_chunk_size": 64, "eos_token_id": ends, "pad_token_id": 0, "return_dict_in_generate": True}
    strategy = SpeculativeDecoding(SuffixDraft(), layout=layout)
    plain, expected = peak_of(lambda: target.generate(**call))
    ours, output = peak_of(lambda: target.generate(**call, custom_generate=strategy))
    assert torch.equal(output.sequences, expected.sequences)
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert (strategy.report.layout, strategy.report.drafted > 0) == (layout, True)
    assert ours < (1.15 if rows == 1 else 1.45) * plain, (ours, plain)


@pytest.mark.parametrize(
    ("case", "ends"), each_value([PAIRS[n] for n in (0, 1, 3, 2)], [False, True])
)  # both for each layout
def test_the_cache_of_an_encoder_decoder_serves_the_next_turn(case: tuple[str, str], ends: bool):
    model_type, layout = case
    target = model(model_type)
    call, counts = calls(target, "coupled", ends)
    output, expected = generate(target, call, layout), generate(target, call)
    past, stocks = output.past_key_values, expected.past_key_values
    assert isinstance(past, EncoderDecoderCache)
    for layer, other in zip(past.cross_attention_cache.layers, stocks.cross_attention_cache.layers, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), (other.keys, other.values))
    for layer, other in zip(past.self_attention_cache.layers, stocks.self_attention_cache.layers, strict=True):
        assert layer.keys.shape == other.keys.shape
        for row, count in enumerate(counts):
            torch.testing.assert_close(layer.keys[row, :, :count], other.keys[row, :, :count], rtol=1e-4, atol=1e-4)
    assert_continues(target, later_of_decoder(call, output.sequences, counts), past)


def test_a_cache_of_the_user_is_filled_with_what_an_encoder_gave():
    target = model("bart")
    call, _ = calls(target, "greedy", ends=False)
    user = EncoderDecoderCache(DynamicCache(), DynamicCache())
    output = generate(target, call | {CACHE: user}, "padded")
    assert output.past_key_values is user
    assert user.get_seq_length() == NEW_TOKENS
    assert_continues(target, later_of_decoder(call, output.sequences, [NEW_TOKENS] * ROWS), user)
