"""Pairs of any size whose acceptance is set, and the bench on them: `python scripts/grafted.py 30M 163M --batch 1 8`.

A grafted pair is synthetic: a random Llama, whose first layers are the draft, while its later layers add a residual
scaled by ε. The smaller ε is, the more the two agree, and every forward costs what it costs in a trained model of this
size. Such models know no language, so their prompts are random tokens. Needs nothing but what the package needs.
"""

import argparse
import copy
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel


WEIGHT_STD = 0.05
LOGIT_STD = 3.0  # of the logits; unrelated models of this sharpness agree to 2 Φ(-3 / sqrt 2) = 0.03
TOLERANCE = 0.01  # of α, where ε is looked for
COLUMNS = ("tokens_per_second", "alpha", "tokens_per_round", "speedup", "forward_limited_speedup", "expected_speedup")


@dataclass(frozen=True)
class Recipe:
    """What a grafted pair is made of."""

    hidden: int  # width of the stream
    inner: int  # width of the feed-forwards
    layers: int
    draft_layers: int  # the first of them
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True  # whether the embeddings are the head as well
    epsilon: float | None = None  # None is looked for, so that α is `alpha`
    alpha: float = 0.8
    unrelated: bool = False  # whether the draft has random weights of its own instead
    window: int | None = None  # how many tokens each layer sees
    seed: int = 0


SMALL = Recipe(384, 1024, 15, 2, heads=8, kv_heads=8, vocab=8192, epsilon=0.065)
MIDDLE = Recipe(768, 2048, 22, 2, heads=12, kv_heads=12, vocab=8192, epsilon=0.056)
RECIPES = {
    "30M": SMALL,
    "30M-low": replace(SMALL, epsilon=0.184, alpha=0.5),
    "30M-deep": replace(SMALL, draft_layers=5, epsilon=0.056, alpha=0.9),
    "30M-unrelated": replace(SMALL, unrelated=True),
    "30M-self": replace(SMALL, draft_layers=SMALL.layers),  # a draft as slow as its target
    "30M-right": replace(SMALL, epsilon=0.002),  # one that is nearly always right
    "3M-unrelated": Recipe(192, 512, 6, 3, heads=4, kv_heads=4, vocab=4096, unrelated=True),
    "30M-window": replace(SMALL, window=128),
    "163M": MIDDLE,
    "1B": Recipe(2048, 8192, 16, 2, heads=32, kv_heads=8, vocab=128256),  # the shapes of Llama 3.2 1B
    "7B": Recipe(4096, 14336, 32, 2, heads=32, kv_heads=8, vocab=32768, tied=False),  # those of Mistral 7B v0.3
}


class Grafted(NamedTuple):
    """Both models; α is the mean of sum_x min(p, q) on random text, at temperature 1."""

    target: PreTrainedModel
    draft: PreTrainedModel
    alpha: float


@torch.no_grad()
def graft(recipe: Recipe, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Grafted:
    """Make both models of a recipe, the same ones on each call on the same kind of device; what they share is once."""
    target = random_llama(recipe, recipe.layers, dtype, device)
    if recipe.unrelated:
        draft = random_llama(replace(recipe, seed=recipe.seed + 1), recipe.draft_layers, dtype, device)
        return Grafted(target, draft, acceptance(target, draft))
    draft = copy.deepcopy(target, {id(weight): weight for weight in target.parameters()})  # all but the weights
    draft.model.layers = draft.model.layers[: recipe.draft_layers]
    draft.config.num_hidden_layers = recipe.draft_layers
    later = target.model.layers[recipe.draft_layers :]
    weights = [weight for layer in later for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)]
    scale = recipe.epsilon or 1.0
    for weight in weights:
        weight.mul_(scale)
    alpha, low, high = acceptance(target, draft), math.log(1e-3), math.log(10.0)
    while recipe.epsilon is None and high - low > 1e-2 and abs(alpha - recipe.alpha) > TOLERANCE:
        middle = (low + high) / 2  # of log ε: the larger, the smaller α
        for weight in weights:
            weight.mul_(math.exp(middle) / scale)
        scale, alpha = math.exp(middle), acceptance(target, draft)
        low, high = (middle, high) if alpha > recipe.alpha else (low, middle)
    return Grafted(target, draft, alpha)


def random_llama(recipe: Recipe, layers: int, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """A target, or a draft of fewer layers, without an end token."""
    config = MistralConfig(  # without a window a Llama
        sliding_window=recipe.window,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        vocab_size=recipe.vocab,
        tie_word_embeddings=recipe.tied,
        max_position_embeddings=8192,
        initializer_range=WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.model.norm.weight.fill_(LOGIT_STD / (WEIGHT_STD * math.sqrt(recipe.hidden)))
    return model


@torch.no_grad()
def acceptance(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """α at temperature 1 over the positions of random text, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, target.config.vocab_size, (4, 64), generator=generator).to(target.device)
    p, q = (model(input_ids=ids, use_cache=False).logits.float().softmax(-1) for model in (target, draft))
    return float(torch.minimum(p, q).sum(-1).mean())


def main() -> None:
    """Time methods, pair by pair and batch by batch; each table is printed as soon as it is known."""
    from hf_specx import DraftTargetPair
    from hf_specx.bench.bench_settings import BenchSettings
    from hf_specx.bench.run_bench import run_bench

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", choices=list(RECIPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--method", nargs="+", default=["plain", "assisted-5", "block-5", "block-auto"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "repeats": arguments.repeats,
        "dtype": arguments.dtype,
    }
    for name in arguments.pairs:
        pair = graft(RECIPES[name], getattr(torch, arguments.dtype), device)
        for batch in arguments.batch:
            settings = BenchSettings(f"grafted-{name}", tuple(arguments.method), batch, **sizes)
            result = run_bench(settings, DraftTargetPair(pair.target, pair.draft), " ".join(["python", *sys.argv]))
            print(f"\n{settings} (synthetic, α {pair.alpha:.2f}), {result['provenance']}\n")
            print(f"| method | {' | '.join(COLUMNS)} | |")
            print("| --- |" + " ---: |" * len(COLUMNS) + " --- |")
            for method, figures in result["methods"].items():
                values = [figures.get(column) for column in COLUMNS]
                medians = [value["median"] if isinstance(value, dict) else value for value in values]
                shown = ["-" if value is None else f"{value:.2f}" for value in medians]
                print(f"| {method} | {' | '.join(shown)} | {figures.get('unavailable', '')} |", flush=True)


if __name__ == "__main__":
    main()
