"""A strategy takes nothing away: what plain `generate` serves and cannot be speculated, transformers itself decodes.

The text is that of plain `generate`, under the same random numbers; the reason is in the report and in one warning.
"""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import zoo
from tiny import prompts, tiny
from transformers import (
    DynamicCache,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.models.slots import CACHE


NEW = 6
WAYS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}


class OwnLayer(DynamicLayer):
    """A layer of the user's, which a strategy cannot know."""


class OwnCache(DynamicCache):
    """A cache of the user's."""


def mask(change: Callable[[torch.Tensor], object], target: Callable[[], PreTrainedModel] = tiny) -> Callable:
    def make() -> tuple[PreTrainedModel, dict]:
        ones = torch.ones(2, 6, dtype=torch.int64)
        changed = change(ones)
        given = changed if isinstance(changed, torch.Tensor) else ones
        return target(), prompts(2, width=6) | {"attention_mask": given}

    return make


def put(row, column, value: float = 0) -> Callable[[torch.Tensor], None]:
    return lambda ones: ones.__setitem__((row, column), value)


def asked(target: Callable[[], PreTrainedModel] = tiny, rows: int = 2, **options) -> Callable:
    return lambda: (target(), prompts(rows, width=6) | options)


def cached(make: Callable[[PreTrainedModel], object]) -> Callable:
    def case() -> tuple[PreTrainedModel, dict]:
        target = tiny()
        return target, prompts(2, width=6) | {CACHE: make(target)}

    return case


def of_own_layers(target: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [OwnLayer(), OwnLayer()]
    return cache


def holds_the_whole_text() -> tuple[PreTrainedModel, dict]:
    target, ones = tiny(), torch.ones(2, 2, dtype=torch.int64)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=ones, **{CACHE: cache})
    return target, {"input_ids": prompts(2, width=2)["input_ids"], "attention_mask": ones, CACHE: cache}


def holed_decoder() -> tuple[PreTrainedModel, dict]:
    text = torch.ones(2, 3, dtype=torch.int64)
    holes = torch.tensor([[1, 0, 1], [1, 1, 1]])
    asks = prompts(2, width=6) | {"decoder_input_ids": text, "decoder_attention_mask": holes}
    return zoo.build("seq2seq", "led"), asks


def negative() -> tuple[PreTrainedModel, dict]:
    ids, ends = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]])
    guidance = {"guidance_scale": 1.5, "negative_prompt_ids": ids, "negative_prompt_attention_mask": ends}
    return tiny(), prompts(2, width=6) | guidance


def embedded(chunk: int) -> Callable:
    """Plain `generate` reads the ids in pieces, and not these embeddings."""

    def case() -> tuple[PreTrainedModel, dict]:
        target, given = tiny(), prompts(2, width=6)
        embeds = target.get_input_embeddings()(given["input_ids"]).detach()
        return target, given | {"inputs_embeds": embeds, "prefill_chunk_size": chunk}

    return case


def training() -> PreTrainedModel:
    return tiny(attention_dropout=0.1).train()


def called(model_type: str, attention: str = "sdpa") -> PreTrainedModel:
    model = tiny()
    model.config.model_type, model.config._attn_implementation = model_type, attention
    return model


def no_plain_speculation(model_type: str) -> Callable:
    return lambda: (zoo.build("causal", model_type), prompts(2, width=6))


CASES: dict[str, Callable[[], tuple[PreTrainedModel, dict]]] = {
    # The model
    "the target is in training mode, where its text is random.*target.eval": asked(training),
    "attends in both directions.*set is_decoder=True": asked(lambda: tiny("bert", is_decoder=False)),
    "model type 'mamba' cannot be a target.*other logits than single steps": no_plain_speculation("mamba"),
    "model type 'jamba' cannot be a target.*other logits than single steps": no_plain_speculation("jamba"),
    "model type 'rwkv' cannot be a target.*a structure of its own": no_plain_speculation("rwkv"),
    "model type 'xlnet' cannot be a target.*a structure of its own": no_plain_speculation("xlnet"),
    # How it generates
    "num_beams=3 is beam search, .*set num_beams=1": asked(num_beams=3, num_return_sequences=2),
    "prompt_lookup_num_tokens=3 selects .*SuffixDraft.3.*leave it out": asked(rows=1, prompt_lookup_num_tokens=3),
    "assistant_early_exit=1 selects .*EarlyExitDraft.1.*leave it out": asked(rows=1, assistant_early_exit=1),
    "use_cache=False leaves no cache, .*use_cache=True": asked(use_cache=False),
    "is a StaticCache": asked(cache_implementation="static"),
    "is a QuantizedCache": asked(cache_implementation="quantized", cache_config={"backend": "fp8"}),
    "is a StaticCache, from which .* use a DynamicCache": cached(lambda target: StaticCache(target.config, 40)),
    "is a QuantizedCache, from which": cached(lambda target: QuantizedCache("fp8", target.config)),
    "is a OwnCache, from which": cached(lambda target: OwnCache(config=target.config)),
    "is a DynamicCache with a OwnLayer, from which": cached(of_own_layers),
    "prefill_chunk_size= reads tokens in the places of inputs_embeds=": embedded(1),
    # Its text
    "has 7 columns, and the text 6": mask(lambda _: torch.ones(2, 7)),
    "has the value -1000.0; pass 1": mask(lambda ones: (ones.tril() - 1) * 1e3),
    "the prompt of row 1 is empty .*; pass": mask(put(1, slice(None))),
    "row 1 .* ends in 0.*padding_side='left'": mask(put(1, slice(4, 6))),
    "decoder_attention_mask has zeros between.*on the left only": holed_decoder,
    "holds 2 tokens, and the whole text has 2; pass": holds_the_whole_text,
    "row 0 of negative_prompt_attention_mask ends in 0": negative,
}


def run(target: PreTrainedModel, given: dict, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return target.generate(**given, pad_token_id=0, max_new_tokens=NEW, **options)


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "transformers' own sampler decodes" in str(each.message)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reason", CASES)
def test_plain_text_with_the_reason(reason: str, way: str):
    target, given = CASES[reason]()
    expected = run(*CASES[reason](), **WAYS[way])
    strategy = SpeculativeDecoding(SuffixDraft(), num_draft_tokens=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(run(target, given, **WAYS[way], custom_generate=strategy), expected)
        run(*CASES[reason](), **WAYS[way], custom_generate=strategy)
    (message,) = ours(caught)  # not again with the second call
    assert re.search(reason, message)
    assert strategy.report.layout == "plain"
    assert re.search(reason, strategy.report.layout_reason)
    assert strategy.report.drafted == 0
    assert strategy.report.rows == len(expected)
