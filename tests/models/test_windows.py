"""Layers with a window keep that alone in most layouts, and the text is that of plain `generate`."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
import zoo
from all_pairs import all_pairs
from many import assert_alone
from plain import assert_plain, coupled
from tiny import VOCAB_SIZE, WINDOW, near, prompts, tiny
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from hf_specx import EarlyExitDraft, Request, SpeculativeDecoding
from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.common.batch import Batch
from hf_specx.models import compiled, ragged, transformers_cache
from hf_specx.models.choose import make_runner
from hf_specx.models.prompts import prepare
from hf_specx.models.runner import ModelRunner
from hf_specx.models.slots import CACHE, MARGIN, keys_values_of


SPARE = 4  # slots beyond the window; a round of more than three candidates makes rings longer
KINDS = {
    "mistral": {},
    "smollm3": {},  # a layer with a window, then one without
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}
RAGGED = {"ragged": {"layout": "ragged"}, "compiled": {"layout": "ragged", "compile": True}}
CUT = RAGGED | {"padded": {"layout": "padded"}}  # ways to decode in which layers keep their windows alone
LONG = {"max_new_tokens": 5 * WINDOW, "eos_token_id": None}
pytestmark = pytest.mark.filterwarnings("ignore:compile=True compiles")


def some(cases: Iterable[Any], fast_type: str = "") -> list[Any]:
    """Cases, which begin with how they decode: compiled ones, of seconds each, are slow but for those of one type."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*x, marks=[pytest.mark.slow] * (x[0] == "compiled" and x[-1] != fast_type)) for x in each]


@pytest.fixture(autouse=True)
def _short_rings(traced: None, monkeypatch: pytest.MonkeyPatch):
    for module in (ragged, transformers_cache, compiled):
        monkeypatch.setattr(module, "MARGIN", SPARE)
    monkeypatch.setattr(compiled, "AGAIN", SPARE // 2)


@pytest.mark.parametrize(("way", "number", "model_type"), some(all_pairs(CUT, (3, 7), KINDS), "smollm3"))
def test_rows_of_unequal_length_over_several_windows(way: str, number: int, model_type: str):
    target, inputs = tiny(model_type, **KINDS[model_type]).double(), prompts(3, width=3 * WINDOW)
    inputs["attention_mask"][1, :-2] = 0  # so that pads lie in a window
    inputs["attention_mask"][0, -3] = 0  # and a gap
    strategy = coupled(target, 0.05, num_draft_tokens=number, **CUT[way])
    assert_plain(target, strategy, inputs, **LONG, do_sample=True)
    assert 0 < strategy.report.accepted < strategy.report.drafted


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_text_of_compiled_rounds_is_that_of_others(verification: str):
    target, texts = tiny("smollm3").double(), []
    for options in RAGGED.values():
        strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, verification=verification, **options)
        torch.manual_seed(1)
        texts.append(target.generate(**prompts(3, 3 * WINDOW), **LONG, do_sample=True, custom_generate=strategy))
    assert torch.equal(*texts)


QUEUES = all_pairs(RAGGED, ["near", "early exit"], KINDS)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("way", "draft", "model_type"), some(QUEUES, "smollm3"))
def test_rows_of_a_queue_are_replaced(way: str, draft: str, model_type: str):
    """Prompts shorter and longer than a ring, also than the first ones, so that columns are put before all rows."""
    target = tiny(model_type, **KINDS[model_type]).double()
    inputs = prompts(6, width=5 * WINDOW)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    texts.sort(key=len)
    drafts = EarlyExitDraft(1) if draft == "early exit" else near(target, 0.05)
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=3, **RAGGED[way])
    assert_alone(strategy, target, [Request(text) for text in texts], batch_size=2, do_sample=False, **LONG)


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.filterwarnings("ignore:transformers' own sampler")
def test_a_model_that_reads_prompts_without_its_window_completes_whole_batches(parts: int | None):
    """Moshi: its last token of a prompt, fed once more, would see the window alone, as parts of a prompt do."""
    target, text = zoo.build("causal", "moshi").eval(), prompts(1, width=3 * WINDOW)["input_ids"][0]
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    settings = {"do_sample": False, "max_new_tokens": 9, "prefill_chunk_size": parts}
    first = assert_plain(target, strategy, {"input_ids": text[None]}, **settings).text
    cache = lambda: {CACHE: target(first[:, :-1])[CACHE]}  # noqa: E731
    assert_plain(target, strategy, {"input_ids": first}, cache, **settings)
    plain = target.generate(text[None], **settings)[0, len(text) :].tolist()
    assert [x.tokens for x in strategy.generate_many(target, [text] * 3, batch_size=1, **settings)] == [plain] * 3


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("way", some(RAGGED))
def test_what_a_window_has_lost_is_not_copied(way: str, monkeypatch: pytest.MonkeyPatch):
    """What two prompts that come together begin with is read once; that of rows that decode is no longer there."""
    monkeypatch.setattr(ragged, "MIN_COPIED_COLUMNS", 1)
    monkeypatch.setattr(ragged, "MIN_SAVED_TOKENS", 1)
    target = tiny("smollm3").double()
    ids = prompts(1, width=4 * WINDOW)["input_ids"][0].tolist()
    texts = [[*ids[: 3 * WINDOW + number], number + 1] for number in range(6)]
    strategy = SpeculativeDecoding(near(target, 0.0), num_draft_tokens=3, **RAGGED[way])
    assert_alone(strategy, target, [Request(text) for text in texts], batch_size=2, do_sample=False, **LONG)
    # of the shorter one of a pair one token less, since both are read from one column on
    assert strategy.report.copied == sum(2 * (3 * WINDOW + number) - 1 for number in (0, 2, 4))
    assert strategy.report.acceptance_rate == 1


def kernel(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """Attention as FlashAttention's: a 2D mask of the keys, queries at their end, and a window by distance."""
    total = key.shape[2]
    keys = torch.arange(total)
    queries = keys[-query.shape[2] :, None]
    seen = (keys <= queries) & (keys > queries - (sliding_window or total))
    if attention_mask is not None:
        seen = (seen & attention_mask[:, None, None].bool()) | (keys == queries)  # a pad sees itself, for numbers
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("model_type", ["mistral", "smollm3"])
def test_kernels_that_take_no_mask_by_position(model_type: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "kernel", kernel)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "kernel", flash_attention_mask)
    target = tiny(model_type).double()
    target.config._attn_implementation = "kernel"
    strategy = coupled(target, 0.05)
    assert_plain(target, strategy, prompts(3, width=3 * WINDOW), **LONG, do_sample=True)
    assert strategy.report.layout == "padded"


def decoding(way: str, target: PreTrainedModel, width: int, room: int) -> tuple[ModelRunner, Batch]:
    """Two rows with room for so many tokens behind prompts, which are not read yet."""
    prompt = prepare(target, room, prompts(2, width))
    batch = Batch(prompt.input_ids, prompt.kwargs["attention_mask"], 0)
    return make_runner(CUT[way]["layout"], prompt, compiled=way == "compiled"), batch


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("way", CUT)
@torch.no_grad()
def test_rows_may_lack_unequal_numbers_of_tokens(way: str):
    """A draft is fed what it has missed in parts, since windows keep what few tokens before the last ones saw."""
    target, generator = tiny("mistral", num_hidden_layers=3).double(), torch.Generator().manual_seed(0)
    runner, batch = decoding(way, target, 3 * WINDOW, 200)
    runner.prefill()
    runner.has_all_prompt_logits = False
    for gained in ([3, 12], [1, 1], [38, 39]):
        batch.emit(torch.randint(1, VOCAB_SIZE, (2, 39), generator=generator), gained)
        expected = [target(batch.row(row)[None]).logits[:, -1:] for row in range(2)]
        torch.testing.assert_close(runner.decode_step(batch, 0), torch.cat(expected), rtol=0, atol=1e-9)
        batch.write(torch.ones(2, 7, dtype=torch.int64))  # candidates, all of which are rejected
        for ahead in range(1, 8):
            runner.decode_step(batch, ahead)
        for row in range(2):
            runner.limit_computed_tokens(row, batch.counts[row])


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("way", "short"), all_pairs(RAGGED, [0, 1]))
@torch.no_grad()
def test_a_ring_has_no_slot_to_spare(way: str, short: int, monkeypatch: pytest.MonkeyPatch):
    """The first token of a forward sees its window in rings that end with the last one; not if one slot is lacking."""
    monkeypatch.setattr(ragged.RaggedRunner, "_enlarge_rings", lambda *_: False)
    target, generator = tiny("smollm3").double(), torch.Generator().manual_seed(0)
    runner, batch = decoding(way, target, 3 * WINDOW, 200)
    runner.cache = runner._slot_cache(300, WINDOW + 5 - 1 - short)
    runner.prefill()
    for _ in range(4):
        batch.emit(torch.randint(1, VOCAB_SIZE, (2, 5), generator=generator), [5, 5])
        expected = torch.cat([target(batch.row(row)[None]).logits[:, -5:] for row in range(2)])
        logits = runner.decode_tokens(batch, 5, 0, logits_to_keep=5)
        assert torch.allclose(logits, expected, rtol=0, atol=1e-9) == (not short)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("way", some(CUT))
def test_prompts_may_be_read_in_pieces(way: str):
    target, inputs = tiny("mistral").double(), prompts(3, width=4 * WINDOW)
    strategy = coupled(target, 0.05, **CUT[way])
    assert_plain(target, strategy, inputs, **LONG, do_sample=False, prefill_chunk_size=5)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("way", some(CUT))
def test_the_cache_is_that_of_plain_generate(way: str):
    target, inputs = tiny("smollm3").double(), prompts(2, width=3 * WINDOW)
    settings = LONG | {"do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **settings)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, **CUT[way])
    ours = target.generate(**inputs, **settings, custom_generate=strategy)
    for layer, expected in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(layer) is type(expected)
        torch.testing.assert_close(layer.keys, expected.keys, rtol=0, atol=1e-12)
    settings |= {"max_new_tokens": 4, "return_dict_in_generate": False}
    text = plain.sequences
    turns = [
        {"input_ids": text, "attention_mask": torch.ones_like(text), CACHE: x.past_key_values} for x in (plain, ours)
    ]
    assert torch.equal(*(target.generate(**turn, **settings) for turn in turns))


def test_a_cache_without_all_columns_cannot_be_cut_back():
    """The text fits in a ring, whose first slots were written twice; as in plain `generate` its layers say so."""
    target, inputs = tiny("mistral").double(), prompts(1, width=WINDOW + SPARE)
    settings = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    settings["eos_token_id"] = target.generate(**inputs, **settings).sequences[0, -8].item()
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    ours = target.generate(**inputs, **settings, custom_generate=strategy)
    assert ours.sequences.shape[1] == WINDOW + SPARE + 2
    for layer in ours.past_key_values.layers:
        with pytest.raises(RuntimeError, match="crop"):
            layer.crop(-SPARE)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("way", CUT)
@torch.no_grad()
def test_memory_is_nearly_that_of_plain_generate(way: str, monkeypatch: pytest.MonkeyPatch):
    """Of five layers with a window of 128 tokens and one without, after 2,000 tokens: at most 1.3 times."""
    for module in (ragged, transformers_cache, compiled):
        monkeypatch.setattr(module, "MARGIN", MARGIN)
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    target = tiny(
        "gemma3_text", num_hidden_layers=6, sliding_window=128, layer_types=kinds, max_position_embeddings=2048
    )
    plain = DynamicCache(config=target.config)
    target(**prompts(2, 1990), **{CACHE: plain})
    runner, batch = decoding(way, target, 1990, 10)
    runner.prefill()
    for _ in range(2):
        batch.emit(torch.ones(2, 5, dtype=torch.int64), [5, 5])
        runner.decode_tokens(batch, 5, 0, logits_to_keep=5)
    num_bytes = sum(x.untyped_storage().nbytes() for layer in keys_values_of(runner.cache) for x in layer)
    assert num_bytes <= 1.3 * sum(x.keys.nbytes + x.values.nbytes for x in plain.layers)


TYPES = [
    (way, *each) for each, way in product(zoo.model_types(), CUT) if CUT[way]["layout"] in LAYOUTS_OF.get(each[1], ())
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind", "model_type"), TYPES)
def test_every_type_with_windows(way: str, kind: str, model_type: str):
    target = zoo.build(kind, model_type)
    if not any(DynamicCache(config=target.config).is_sliding):
        pytest.skip(f"no layer of {model_type} has a window by its config")
    if way == "compiled" and (reason := compiled._hinders(target)):
        pytest.skip(f"{model_type} is not compiled: {reason}")
    inputs = prompts(3, width=3 * WINDOW) if kind == "causal" else zoo.inputs(target)
    strategy = coupled(target, 0.05, num_draft_tokens=3, **CUT[way])
    assert_plain(target, strategy, inputs, do_sample=False, max_new_tokens=5 * WINDOW)
