"""`generate_many` with compiled forwards: requests take the places of others in the same buffers."""

import pytest
from test_many import GREEDY, SAMPLED, alone, completed, requests
from tiny import near, tiny

from hf_specx import Request, SpeculativeDecoding
from hf_specx.models.regions import Pool


pytestmark = pytest.mark.filterwarnings("ignore:compile=True compiles")


@pytest.mark.parametrize(
    ("model_type", "options", "batch_size"),
    [
        ("gpt2", SAMPLED, 3),
        pytest.param("llama", GREEDY, 3, marks=pytest.mark.slow),
        pytest.param("mistral", SAMPLED, 1, marks=pytest.mark.slow),
    ],
)
def test_requests_get_the_text_of_generate(traced: None, model_type: str, options: dict, batch_size: int):
    """Prompts that are wider than those before them move all slots."""
    target, asked = tiny(model_type, num_hidden_layers=1), requests(10)
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2, verification="coupled", compile=True)
    found = completed(strategy, target, asked, batch_size=batch_size, **options)
    assert [found[index].tokens for index in range(10)] == expected
    assert strategy.report.accepted > 0


def test_places_are_reused_without_compilation(traced: None, monkeypatch: pytest.MonkeyPatch):
    """A second queue finds all forwards compiled, and buffers grow only with the text."""
    target, sizes, take = tiny(num_hidden_layers=1), [], Pool.take
    draft = near(target, 0.2)

    def note(pool, owner, rows, capacity, like):
        sizes.append((rows, capacity))
        return take(pool, owner, rows, capacity, like)

    monkeypatch.setattr(Pool, "take", note)
    asked = [Request(request.input_ids, 20, request.seed) for request in requests(10)]
    compilations = []
    for _ in range(2):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=2, verification="coupled", compile=True)
        found = completed(strategy, target, asked, batch_size=4, **SAMPLED)
        compilations.append(strategy.report.compilations)
    assert compilations[0] > 0
    assert compilations[1] == 0
    assert {capacity for _, capacity in sizes} == {96}
    assert [found[index].tokens for index in range(10)] == [alone(target, request, **SAMPLED) for request in asked]
