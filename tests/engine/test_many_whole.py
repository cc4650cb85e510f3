"""`generate_many` where rows cannot be filled again, and where requests have processors of their own."""

import pytest
import torch
import zoo
from grammar_cases import installed, make, pair
from test_many import GREEDY, SAMPLED, alone, completed, requests
from tiny import near, tiny
from transformers import LogitsProcessor

from hf_specx import Request, SpeculativeDecoding, SuffixDraft


LAYOUTS = {
    "padded": (lambda: tiny(), {"layout": "padded"}, "the layout is 'padded'"),
    "packed": (lambda: tiny(), {"layout": "packed"}, "the layout is 'packed'"),
    "lockstep": (lambda: tiny(), {"layout": "lockstep"}, "the layout is 'lockstep'"),
    "states": (lambda: zoo.build("causal", "lfm2"), {}, "the layout is 'lockstep'"),
    "encoder-decoder": (lambda: zoo.build("seq2seq", "t5"), {}, "has an encoder"),
}


def text(target, request: Request, **options) -> list[int]:
    """What `generate` gives to a request, also to one that an encoder reads."""
    if not target.config.is_encoder_decoder:
        return alone(target, request, **options)
    torch.manual_seed(request.seed or 0)
    ids = torch.as_tensor(request.input_ids)[None]
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, 1:].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_whole_batches(name: str, options: dict):
    make, chosen, reason = LAYOUTS[name]
    target = make()
    asked = requests(9)
    expected = [text(target, request, **options | {"max_new_tokens": request.max_new_tokens}) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, **chosen, verification="coupled")
    forwards = []
    with target.register_forward_hook(lambda *_: forwards.append(1)):
        found = completed(strategy, target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(9)] == expected
    assert "; whole batches, since " in strategy.report.layout_reason
    assert strategy.report.layout_reason.endswith(reason)
    assert strategy.report.emitted == sum(map(len, expected))
    assert len(forwards) < sum(map(len, expected)) / 2


@pytest.mark.parametrize("batch_size", [1, 3, 5])  # the last batch of five has one request
def test_lockstep_takes_the_coupled_text_by_default(batch_size):
    """Under "block" a row's numbers of candidates would follow the others, and with them its text."""
    target, asked = tiny(), requests(6)
    expected = [alone(target, request, **SAMPLED) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, layout="lockstep")
    found = completed(strategy, target, asked, batch_size=batch_size, **SAMPLED)
    assert [found[index].tokens for index in range(6)] == expected
    block = SpeculativeDecoding(near(target, 0.1), layout="lockstep", verification="block")
    with pytest.raises(ValueError, match="^requests have seeds of their own, .* use verification='coupled'"):
        list(block.generate_many(target, asked, batch_size=3, **SAMPLED))


class Counting(LogitsProcessor):
    """Keeps state: each call raises another token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + 3.0 * torch.nn.functional.one_hot(torch.tensor(self.calls % 7), scores.shape[-1])


class Raising(LogitsProcessor):
    """Raises one token; another one for each request."""

    stateless = True

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores + 4.0 * torch.nn.functional.one_hot(torch.tensor(self.token), scores.shape[-1])


def with_own(asked: list[Request], make) -> list[Request]:
    return [
        Request(request.input_ids, request.max_new_tokens, request.seed, None, made)
        for request, made in zip(asked, make(), strict=True)
    ]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("kind", ["alike", "mixed", "stateful among others"])
def test_processors_of_the_requests(options: dict, kind: str):
    """Some have one of their own, some two, some none, beside those of the call; some keep state."""
    target, asked, options = tiny(), requests(10), options | {"repetition_penalty": 1.3}

    def make():
        if kind == "alike":
            return [[Raising(number)] for number in range(10)]
        if kind == "mixed":
            return [[None, [Raising(7)], [Raising(8), Raising(number)]][number % 3] for number in range(10)]
        return [[Counting()] if number % 3 == 1 else None for number in range(10)]

    expected = [
        alone(target, request, **options, logits_processor=request.logits_processor or [])
        for request in with_own(asked, make)
    ]
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, verification="coupled")
    given = {"batch_size": 4, "logprobs": True}
    found = completed(strategy, target, with_own(asked, make), **given, **options)
    assert [found[index].tokens for index in range(10)] == expected
    assert all(len(found[index].logprobs) == len(expected[index]) for index in range(10))
    assert strategy.report.emitted == sum(map(len, expected))
    assert strategy.report.accepted > 0


def test_state_that_requests_would_share_is_refused():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3)
    found = completed(strategy, target, [[1, 2]], logits_processor=[Counting()], **GREEDY)
    assert "Counting may keep state, and all requests would share it; give each its own" in found[0].error
    found = completed(strategy, target, [[1, 2]], stopping_criteria=[Counting()], **GREEDY)
    assert "all requests would share it; call generate for each, or set" in found[0].error


@pytest.mark.parametrize("library", ["xgrammar", "outlines"])
@pytest.mark.parametrize("of_call", [True, False])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_grammars_share_a_batch(of_call: bool, options: dict, library: str):
    """Each request has a matcher of its own, whether its grammar is its own or that of the call."""
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    target, tokenizer = pair().target, pair().tokenizer
    options = options | {"eos_token_id": target.generation_config.eos_token_id}
    cases = ["date"] * 6 if of_call else ["date", "words", "enum", "words", "date", "flat"]
    texts = [tokenizer(text)["input_ids"] for text in ("On ", "The cat", "Colour: ", "a b c d", "Tom", "{}")]
    limits = [24, 5, 20, 9, 14, 24]
    expected = []
    for ids, limit, case, seed in zip(texts, limits, cases, range(6), strict=True):
        made = [make(library, case, len(ids))]
        expected.append(alone(target, Request(ids, limit, seed), **options, logits_processor=made))
    own = [None if of_call else [make(library, case, 0)] for case in cases]
    asked = [
        Request(ids, limit, seed, None, one)
        for ids, limit, seed, one in zip(texts, limits, range(6), own, strict=True)
    ]
    given = {"logits_processor": [make(library, "date", 0)]} if of_call else {}
    strategy = SpeculativeDecoding(pair().draft, num_draft_tokens=3, verification="coupled")
    found = completed(strategy, target, asked, batch_size=3, **options, **given)
    assert [found[index].tokens for index in range(6)] == expected
    assert "one by one" not in strategy.report.layout_reason
    assert strategy.report.accepted > 0


@pytest.mark.parametrize("cases", [[None, "date", "words", None], ["date", None, None, "words"]], ids=["none", "date"])
@pytest.mark.parametrize("kind", ["model", "suffix"])
def test_a_request_without_a_grammar_drafts_as_alone_beside_others(kind: str, cases: list):
    """Whichever comes first: under "block" another number of candidates would be another text."""
    if not installed("xgrammar"):
        pytest.skip("xgrammar is not installed")
    target, tokenizer = pair().target, pair().tokenizer
    options = SAMPLED | {"eos_token_id": target.generation_config.eos_token_id}
    texts = [tokenizer(text)["input_ids"] for text in ("a b a b a b", "On a b", "The cat", "1, 2, 1, 2, 1, 2")]

    def strategy() -> SpeculativeDecoding:
        draft = pair().draft if kind == "model" else SuffixDraft(min_match=1)
        return SpeculativeDecoding(draft, num_draft_tokens=3, verification="block")

    def processors(case: str | None) -> list:
        return [] if case is None else [make("xgrammar", case)]

    expected, drafted = [], 0
    for seed, (ids, case) in enumerate(zip(texts, cases, strict=True)):
        given = {"logits_processor": processors(case), "custom_generate": (one := strategy()), "seeds": [seed]}
        expected.append(alone(target, Request(ids, 20, seed), **options, **given))
        drafted += one.report.drafted
    asked = [Request(texts[seed], 20, seed, None, processors(case) or None) for seed, case in enumerate(cases)]
    found = completed(together := strategy(), target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(4)] == expected
    assert together.report.drafted == drafted > 0
