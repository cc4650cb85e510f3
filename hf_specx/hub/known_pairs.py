"""Ids of well-known pairs that share a tokenizer. Nothing else is claimed of them; `specx tune` finds it out."""

from dataclasses import dataclass
from pathlib import Path

from hf_specx.common.errors import require, similar


EMBEDDED = "embedded"  # the pair in the package
DRAFT_MODEL = "draft"  # the folder in it of a draft model, beside the head that drafts
SEQ2SEQ = "AutoModelForSeq2SeqLM"


@dataclass(frozen=True)
class KnownPair:
    """A target and a draft that others have published: their ids, and the class of transformers that loads both."""

    target: str
    draft: str
    auto_class: str = "AutoModelForCausalLM"


BY_NAME = {  # by what `specx card` and the file in `model_cards/` call the pair
    "qwen3-8b-with-0.6b": KnownPair("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    "qwen3-32b-with-0.6b": KnownPair("Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"),
    "qwen2.5-7b-instruct-with-0.5b-instruct": KnownPair("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "llama-3.1-8b-with-llama-3.2-1b": KnownPair("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
    "llama-3.1-8b-instruct-with-llama-3.2-1b-instruct": KnownPair(
        "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
    ),
    "gemma-2-9b-it-with-2b-it": KnownPair("google/gemma-2-9b-it", "google/gemma-2-2b-it"),
    "smollm2-1.7b-with-135m": KnownPair("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-135M"),
    "pythia-1.4b-deduped-with-160m-deduped": KnownPair(
        "EleutherAI/pythia-1.4b-deduped", "EleutherAI/pythia-160m-deduped"
    ),
    "opt-6.7b-with-125m": KnownPair("facebook/opt-6.7b", "facebook/opt-125m"),
    "bloom-7b1-with-560m": KnownPair("bigscience/bloom-7b1", "bigscience/bloom-560m"),
    "gpt2-xl-with-gpt2": KnownPair("openai-community/gpt2-xl", "openai-community/gpt2"),
    "t5-v1.1-xxl-with-small": KnownPair("google/t5-v1_1-xxl", "google/t5-v1_1-small", SEQ2SEQ),
    "flan-t5-xxl-with-small": KnownPair("google/flan-t5-xxl", "google/flan-t5-small", SEQ2SEQ),
}
NAMES = (EMBEDDED, *BY_NAME)


def embedded_folder() -> Path:
    return Path(__file__).parent / EMBEDDED


def check_known_name(name: str) -> None:
    told = f"{name!r} is no folder here, no id on the Hub, which has an owner (owner/{name}), and no well-known pair; "
    require(name in NAMES, f"{told}{similar(name, NAMES)}known: {', '.join(NAMES)}.")


def is_known(name: str) -> bool:
    """Whether a name means a well-known pair or the embedded one; it does not if a local folder has this name."""
    return name in NAMES and not Path(name).is_dir()


def is_embedded(name: str) -> bool:
    """Whether a name means the pair in the package; it does not if a local folder has this name."""
    return name == EMBEDDED and is_known(name)


def folder_of(name: str) -> str:
    """The folder that "embedded" means, or one in it, as in "embedded/head"; any other name as it is."""
    first, _, inside = name.partition("/")
    folder = embedded_folder() / inside
    return str(folder) if is_embedded(first) and folder.is_dir() else name
