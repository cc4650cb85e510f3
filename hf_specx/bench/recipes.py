"""What grafted pairs are made of: sizes, and the acceptance that each is to have."""

from dataclasses import dataclass, replace

from hf_specx.common.errors import require


PREFIX = "grafted-"


@dataclass(frozen=True)
class Recipe:
    """What a grafted pair is made of, all llamas.

    Attributes:
        hidden, inner: widths of the stream and of the feed-forwards.
        layers: of the target, of which the first `draft_layers` are the draft's.
        heads, kv_heads: of attention.
        vocab: tokens.
        tied: whether the embeddings are the head as well.
        epsilon: by which the later layers' residuals are scaled; None is looked for when the pair is made.
        alpha: acceptance to look for, or that was found with this `epsilon`.
        unrelated: whether the draft has random weights of its own instead.
        positions: the longest text.
        seed: of the weights.

    Raises:
        ValueError: for a draft without layers or with all of the target's, and for heads that do not divide.
    """

    hidden: int
    inner: int
    layers: int
    draft_layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True
    epsilon: float | None = None
    alpha: float = 0.8
    unrelated: bool = False
    positions: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            0 < self.draft_layers < self.layers,
            f"draft_layers={self.draft_layers} is not between 0 and the {self.layers} layers of the target; give "
            "fewer, 1 or more.",
        )
        require(
            self.hidden % (2 * self.heads) == 0 and self.heads % self.kv_heads == 0,
            f"{self.heads} heads and {self.kv_heads} key-value heads do not divide a width of {self.hidden}; the "
            "heads must be a multiple of the key-value heads, and each must be of an even width.",
        )


SMALL = Recipe(384, 1024, 15, 2, heads=8, kv_heads=8, vocab=8192, epsilon=0.065)
MIDDLE = Recipe(768, 2048, 22, 2, heads=12, kv_heads=12, vocab=8192, epsilon=0.056)
LARGE = Recipe(2048, 8192, 16, 2, heads=32, kv_heads=8, vocab=128256)  # the shapes of Llama 3.2 1B
HUGE = Recipe(4096, 14336, 32, 2, heads=32, kv_heads=8, vocab=32768, tied=False)  # those of Mistral 7B v0.3
RECIPES = {
    "30M": SMALL,
    "30M-gqa": replace(SMALL, kv_heads=2),
    "30M-low": replace(SMALL, epsilon=0.184, alpha=0.5),
    "30M-deep": replace(SMALL, draft_layers=5, epsilon=0.056, alpha=0.9),
    "30M-unrelated": replace(SMALL, unrelated=True),
    "163M": MIDDLE,
    "163M-gqa": replace(MIDDLE, kv_heads=3),
    "1B": LARGE,
    "1B-low": replace(LARGE, alpha=0.5),
    "1B-deep": replace(LARGE, draft_layers=5, alpha=0.9),
    "1B-unrelated": replace(LARGE, unrelated=True),
    "7B": HUGE,
}


def check_grafted(name: str) -> None:
    """Whether there is a grafted pair of this name, if the name is one of theirs."""
    known = [PREFIX + each for each in RECIPES]
    told = f"the grafted pair {name!r} is unknown; choose one of {', '.join(known)}."
    require(not name.startswith(PREFIX) or name in known, told)
