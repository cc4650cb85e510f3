"""What tests of model cards and exports share: a config with nothing left out."""

from dataclasses import replace

from hf_specx.hub.pair_config import Measurement, ModelSource, PairConfig, TokenizerFacts


def measured(**changes) -> Measurement:
    how = {"batch": 8, "dtype": "bfloat16", "verification": "block", "num_draft_tokens": 4, "layout": "ragged"}
    seen = {"alpha": 0.7491, "cost_coefficient": 0.181, "tokens_per_round": 2.349, "measured_speedup": 1.388}
    expected = {"expected_speedup": 1.691, "forward_limited_speedup": 1.742}
    where = {"hardware": "a processor", "versions": {"torch": "2.13.0", "transformers": "5.23.0"}}
    return Measurement(**how | seen | expected | where | {"command": "specx tune a b"} | changes)


def full(**changes) -> PairConfig:
    """A config of a target inside and a draft by reference, with nothing left out."""
    facts = {"auto_class": "AutoModelForCausalLM", "model_type": "llama", "dtype": "float32", "fingerprint": "f"}
    facts |= {"vocab_size": 48, "parameters": 12345, "max_positions": 128}
    config = PairConfig(
        ModelSource(**facts),
        ModelSource("org/draft", "c0ffee", "small", **facts),
        TokenizerFacts("content", 48, {"eos_token": "</s>"}),
        num_draft_tokens=3,
        verification="token",
        layout="padded",
        measurements=[measured()],
        license="apache-2.0",
        notes="## How it was made\n\nBy hand.",
    )
    return replace(config, **changes)
