"""Time the layouts against each other, on batches of equal and of unequal prompts.

The target is a random llama, the draft its first layer, and decoding is greedy, so all texts are equal. Each figure is
a median over runs in turns.
"""

import copy
import statistics
import time
import warnings
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.layouts.choose import DECODERS


VOCAB_SIZE, NEW_TOKENS, NUM_DRAFT_TOKENS = 8192, 64, 4
BATCHES = {
    "8 x 50": [50] * 8,
    "8 x 200": [200] * 8,
    "2 x 400, 6 x 50": [400] * 2 + [50] * 6,
    "800, 7 x 200": [800] + [200] * 7,
    "1500, 7 x 50": [1500] + [50] * 7,
}


def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target of four layers of which the first matters most, and a draft that has only this one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, num_key_value_heads=4, initializer_range=0.05, **sizes, **special
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.15
            layer.mlp.down_proj.weight *= 0.15
    draft = copy.deepcopy(target)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    return target, draft


def prompts(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(1, VOCAB_SIZE, mask.shape) * mask, "attention_mask": mask}


def main(repeats: Annotated[int, typer.Option(help="Timed runs of each.")] = 5) -> None:
    """Print the seconds that the ragged layout takes, and how many times as fast the others are."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    target, draft = pair()
    others = [layout for layout in DECODERS if layout != "ragged"]
    table = Table("prompts", "pads", "ragged, s", *others, title=f"{NEW_TOKENS} new tokens; times as fast as ragged")
    for name, lengths in track(BATCHES.items(), description="batches"):
        inputs = prompts(lengths)
        seconds: dict[str, list[float]] = {layout: [] for layout in DECODERS}
        for _ in range(1 + repeats):
            texts = []
            for layout, noted in seconds.items():
                strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, layout=layout)
                started = time.perf_counter()
                text = target.generate(  # type: ignore[operator]
                    **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, custom_generate=strategy
                )
                noted.append(time.perf_counter() - started)
                texts.append(text)
            assert all(torch.equal(text, texts[0]) for text in texts)
        medians = {layout: statistics.median(noted[1:]) for layout, noted in seconds.items()}  # the first warms up
        pads = 1 - sum(lengths) / (len(lengths) * max(lengths))
        ratios = [f"{medians['ragged'] / medians[layout]:.2f}" for layout in others]
        table.add_row(name, f"{pads:.0%}", f"{medians['ragged']:.2f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
