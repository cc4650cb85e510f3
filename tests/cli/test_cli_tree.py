"""`--tree`: nodes as they are typed."""

import pytest

from hf_specx.cli.generate import strategy_options


@pytest.mark.parametrize(
    ("typed", "options"), [("8", {"tree": 8}), ("auto", {"tree": "auto"}), ("no", {"tree": False}), (None, {})]
)
def test_what_was_typed(typed: str | None, options: dict):
    assert strategy_options(None, None, typed) == options


@pytest.mark.parametrize("typed", ["0", "65", "wide", "-1"])
def test_what_is_no_number_of_nodes_is_refused(typed: str):
    with pytest.raises(ValueError, match="is no number of nodes; give an int from 1 to 64, 'auto', or False"):
        strategy_options(None, None, typed)
