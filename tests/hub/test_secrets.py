"""Secrets in what is saved: hidden, wherever they stand; all else stays as it is."""

import pytest

from hf_specx.hub.folders import without_folders
from hf_specx.hub.secrets import without_secrets


TOKEN = "hf_" + "aB3" * 12
TEXTS = {
    'specx distill a b --set \'training={"hub_token": "hf_S\\"X", "fp16": true}\' --max-new-tokens 8': (
        'specx distill a b --set \'training={"hub_token": "<hidden>", "fp16": true}\' --max-new-tokens 8'
    ),
    "distill(m, training={'hub_token': 'S', 'push_to_hub_token': None}, max_new_tokens=8)": (
        "distill(m, training={'hub_token': '<hidden>', 'push_to_hub_token': None}, max_new_tokens=8)"
    ),
    "HF_TOKEN=SECRET specx tune --token SECRET --api-key=SECRET x": (
        "HF_TOKEN=<hidden> specx tune --token <hidden> --api-key=<hidden> x"
    ),
    f"login {TOKEN} end": "login <hidden> end",
}
LEFT = [
    "hf_specx.distill(target, 'layers:2', num_draft_tokens=4, eos_token='</s>', hf_home=1)",
    "specx generate 'tell me a secret about a token of love' --max-new-tokens 8 --num-draft-tokens 4",
    "specx distill a b --set average_tokens_across_devices=true",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str):
    assert without_secrets(text) == without_secrets(TEXTS[text]) == TEXTS[text]
    assert "SECRET" not in without_folders(text)


@pytest.mark.parametrize("text", LEFT)
def test_texts_without_any(text: str):
    assert without_secrets(text) == text


def test_settings():
    """In any depth; what says that there is none, or that one is to be used, stays."""
    settings = {
        "hub_token": "S",
        "a": {"b": [{"api_key": "S"}, TOKEN], "pad_token": "x"},
        "token": True,
        "max_tokens": 8,
    }
    shown = {"hub_token": "<hidden>", "a": {"b": [{"api_key": "<hidden>"}, "<hidden>"], "pad_token": "x"}}
    assert without_secrets(settings) == shown | {"token": True, "max_tokens": 8}
    assert settings["hub_token"] == "S"
