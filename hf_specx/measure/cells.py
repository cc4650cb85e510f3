"""What is measured: cells, each a batch of one pair in which contenders take turns, and the grids of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


GAMMA = 5  # candidates a round where verifiers are compared
Measured = dict[str, Any]  # a cell with what was measured, as a file of results has it
AUTO_NUMBERS = range(1, 9)  # fixed numbers that "auto" is compared with
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
SHORT, LONG = 100, 4000  # tokens of context whose rounds are compared
FIXED = f"block-{GAMMA}"
VERIFIED = (FIXED, f"token-{GAMMA}", f"coupled-{GAMMA}")
COMPILED_NAMES = ("plain-compiled", f"{FIXED}-compiled")
STOCK_NAMES = ("stock", f"stock-{GAMMA}")  # they take one row alone
BARED = ("plain", FIXED)
EXPERIMENTS = {  # what each is for
    "quick": "a first look",
    "speed": "a fixed number of candidates, compared with plain, stock and the bare forwards",
    "verifiers": "a round of each verifier",
    "compiled": "compiled forwards, compared with plain compiled ones and stock",
    "long": "the same after prompts of 1,000 tokens",
    "defaults": "what users get without options",
    "unrelated": "a draft that knows nothing of its target",
    "auto": "the number of candidates that is chosen, compared with every fixed one",
    "context": "a round outside of its forwards, after 100 tokens and after 4,000",
    "memory": "what a call allocates beyond models, keys and values",
    "temperature": "acceptance and latency by temperature",
}


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        experiment: one of `EXPERIMENTS`, which says how it is measured and what for.
        pair: its name, as `load_bench_pair` knows it.
        contenders: names, as `contenders.way` reads them.
        dtype: "float32", "bfloat16", or "auto".
        batch: B.
        prompt_tokens, new_tokens: of each row.
        temperature: 0 is greedy.
        top_p: 1 is off.
        repeats: timed runs of each contender, after one that warms up.
        bare: those of the contenders, plain and eager ours, whose forwards are run on their own as well.
        seed: turn i of every contender starts from `torch.manual_seed(seed + i)`.
    """

    experiment: str
    pair: str
    contenders: tuple[str, ...]
    dtype: str = "float32"
    batch: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    repeats: int = 3
    bare: tuple[str, ...] = ()
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.new_tokens}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return drawn | {"max_new_tokens": self.new_tokens}

    @property
    def turns(self) -> int:
        """How often contenders are called."""
        return len(self.contenders) * (1 + self.repeats) * (2 if self.experiment == "context" else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are in a file of results."""
        return asdict(self) | {"contenders": list(self.contenders), "bare": list(self.bare)}

    def __str__(self) -> str:
        warped = "" if (self.temperature, self.top_p) == (1, 1) else f", T={self.temperature:g}"
        warped += "" if self.top_p == 1 else f", top-p {self.top_p:g}"
        sizes = f"batch {self.batch}, {self.prompt_tokens} + {self.new_tokens} tokens"
        return f"{self.experiment}: {self.pair} {self.dtype}, {sizes}{warped}"


def contenders(batch: int, *names: str) -> tuple[str, ...]:
    """The names, without those of transformers' assisted decoding for more than one row, which it does not take."""
    return tuple(name for name in names if batch == 1 or name not in STOCK_NAMES)


def quick_cells(pair: str, batches: Sequence[int], names: Sequence[str], **settings: Any) -> list[Cell]:
    """A first look at a pair.

    Args:
        pair: its name.
        batches: sizes.
        names: of contenders; [] for the usual ones.
        **settings: of each cell.
    """
    usual = ("plain", "stock", "block-auto", "coupled-auto")
    cells = []
    for batch in batches:
        chosen = tuple(names) or contenders(batch, *usual)
        bare = tuple(name for name in chosen if not name.startswith("stock") and not name.endswith("-compiled"))
        cells.append(Cell("quick", pair, chosen, batch=batch, bare=bare, **{"new_tokens": 64} | settings))
    return cells


def cpu_grid() -> list[Cell]:
    """What two cores can measure within half an hour."""
    small, middle = "grafted-30M", "grafted-163M"
    half: dict[str, Any] = {"dtype": "bfloat16"}
    warpers = {"temperature": 0.7, "top_p": 0.9}
    return [
        *speed_cells(small, (1,), new_tokens=192, repeats=6),  # what few texts gain is chance
        *speed_cells(small, (4, 8, 16), new_tokens=192),
        *compiled_cells(small, (1,), new_tokens=64, repeats=9),
        *compiled_cells(small, (8,), new_tokens=64),
        *verifier_cells(small, (1, 8)),
        long_cell(small),
        *speed_cells(middle, (1,), new_tokens=96, repeats=6, **half),
        *speed_cells(middle, (4, 8), new_tokens=96, **half),
        *compiled_cells(middle, (1,), new_tokens=64, **half),
        *verifier_cells(middle, (1, 8), **half),
        long_cell(middle, **half),
        *(default_cell(dtype, batch) for dtype in ("float32", "bfloat16") for batch in (1, 8)),
        *(default_cell("float32", 4), long_cell("embedded", **warpers)),
        *unrelated_cells(f"{small}-unrelated", (1, 8), repeats=2),
        *auto_cells(("embedded", f"{small}-low", f"{small}-deep"), (1,), new_tokens=64),
        *context_cells((small, f"{small}-gqa")),
        *memory_cells(small, (1, 8)),
        *temperature_cells("embedded", (1,), new_tokens=64),
    ]


def gpu_grid() -> list[Cell]:
    """The same with models of sizes that people use."""
    half: dict[str, Any] = {"dtype": "bfloat16"}
    sizes = (1, 2, 4, 8, 16, 32)
    one, seven = "grafted-1B", "grafted-7B"
    return [
        *(
            cell
            for name in (one, seven)
            for cells in (speed_cells, compiled_cells, verifier_cells)
            for cell in cells(name, sizes, **half)
        ),
        *(long_cell(name, **half) for name in (one, seven)),
        *(default_cell("bfloat16", batch) for batch in (1, 8, 32)),
        *unrelated_cells(f"{one}-unrelated", (1, 8), **half),
        *auto_cells((one, f"{one}-low", f"{one}-deep"), (1, 8), **half),
        *context_cells((one, seven), **half),  # both have 4 query heads for each of the keys
        *memory_cells(one, (1, 8, 32), **half),
        *temperature_cells("embedded", (1, 8)),
        *temperature_cells(one, (1,), **half),
    ]


def speed_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Points 1, 2 and 3."""
    names = ("plain", *STOCK_NAMES, FIXED)
    return [Cell("speed", pair, contenders(b, *names), batch=b, bare=BARED, **settings) for b in batches]


def compiled_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Points 2 and 3, their second halves."""
    names = ("plain", f"stock-{GAMMA}", FIXED, *COMPILED_NAMES)
    return [Cell("compiled", pair, contenders(b, *names), batch=b, **settings) for b in batches]


def verifier_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Point 6."""
    given = {"new_tokens": 48, "repeats": 5} | settings
    return [Cell("verifiers", pair, VERIFIED, batch=b, **given) for b in batches]


def long_cell(pair: str, **settings: Any) -> Cell:
    names = ("plain", f"stock-{GAMMA}", FIXED)
    return Cell("long", pair, names, prompt_tokens=1000, bare=BARED, **{"new_tokens": 64} | settings)


def default_cell(dtype: str, batch: int) -> Cell:
    """Point 2, its second half."""
    names = contenders(batch, "plain", "stock", f"stock-{GAMMA}", "block-auto")
    warpers = {"temperature": 0.7, "top_p": 0.9}
    return Cell("defaults", "embedded", names, dtype, batch, **warpers, repeats=5)  # type: ignore[arg-type]


def unrelated_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Point 4, its first half."""
    names = ("plain", "block-auto")
    return [Cell("unrelated", pair, names, batch=b, new_tokens=512, **settings) for b in batches]


def auto_cells(pairs: Sequence[str], batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Point 4, its second half."""
    names = ("plain", "block-auto", *(f"block-{number}" for number in AUTO_NUMBERS))
    return [Cell("auto", pair, names, batch=b, repeats=6, **settings) for pair in pairs for b in batches]


def context_cells(pairs: Sequence[str], **settings: Any) -> list[Cell]:
    """Point 5, its first half."""
    given = {"new_tokens": 64, "repeats": 5} | settings
    return [Cell("context", pair, (FIXED,), prompt_tokens=LONG, **given) for pair in pairs]


def memory_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Point 5, its second half; over many tokens, so that rows drift apart."""
    return [Cell("memory", pair, VERIFIED, batch=b, new_tokens=256, repeats=1, **settings) for b in batches]


def temperature_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Curves; greedy at 0."""
    names = ("plain", "block-auto")
    return [
        Cell("temperature", pair, names, batch=b, temperature=t, **settings) for b in batches for t in TEMPERATURES
    ]
