"""What is measured: cells, each a batch of one pair in which contenders take turns, and the grids of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_specx.common.errors import require

from .checks import check_runs, check_sampling
from .copying import KINDS


GAMMA = 5  # candidates a round where verifiers are compared
Measured = dict[str, Any]  # a cell with what was measured, as a file of results has it
AUTO_NUMBERS = range(1, 9)  # fixed numbers that "auto" is compared with
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
SHORT, LONG = 100, 4000  # tokens of context whose rounds are compared
FIXED = f"block-{GAMMA}"
VERIFIED = (FIXED, f"token-{GAMMA}", f"coupled-{GAMMA}")
COMPILED_NAMES = ("plain-compiled", f"{FIXED}-compiled")
NO_REPLAY = ("stock", "lookup", "exit", "several")  # how the names begin of those whose forwards are not replayed
EXIT_LAYER = 2  # the first layers of the grafted pairs that predict
EXIT_NAMES = (f"stock:{EXIT_LAYER}", f"exit:{EXIT_LAYER}-auto")
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
    "suffix": "drafts without a model, and together with one, where text repeats and where it does not",
    "exit": "the target's first layers as a draft, compared with plain and with transformers' own early exit",
}


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        experiment: one of `EXPERIMENTS`, which says how it is measured and what for.
        pair: its name, as `load_bench_pair` knows it.
        contenders: names, as `ways.way` reads them; one that cannot run is noted with the reason.
        dtype: "float32", "bfloat16", or "auto".
        batch: B.
        prompt_tokens, new_tokens: of each row.
        temperature: 0 is greedy.
        top_p: 1 is off.
        repeats: timed runs of each contender, after one that warms up.
        bare: those of the contenders, plain and eager ours, whose forwards are run on their own as well.
        seed: turn i of every contender starts from `torch.manual_seed(seed + i)`.
        texts: kind of prompts, one of `copying.KINDS`; "" for those of the pair.
        prompts: digest of texts that are in place of the pair's own; "" for these.
        models: tells those of this pair's name from others that had it; "" where a name means the same ones always.

    Raises:
        ValueError: for sizes, repeats or sampling with which there is nothing to time.
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
    texts: str = ""
    prompts: str = ""
    models: str = ""

    def __post_init__(self) -> None:
        check_runs((self.batch,), self.repeats)
        check_sampling(self.temperature or 1.0, self.top_p)
        require(
            self.prompt_tokens >= 1 and self.new_tokens >= 2,
            f"prompt_tokens={self.prompt_tokens} and new_tokens={self.new_tokens} leave no round to time; give 1 or "
            "more, and 2 or more.",
        )

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
        values = asdict(self) | {"contenders": list(self.contenders), "bare": list(self.bare)}
        return {name: value for name, value in values.items() if name not in ("texts", "prompts", "models") or value}

    def __str__(self) -> str:
        warped = "" if (self.temperature, self.top_p) == (1, 1) else f", T={self.temperature:g}"
        warped += "" if self.top_p == 1 else f", top-p {self.top_p:g}"
        sizes = f"batch {self.batch}, {self.prompt_tokens} prompt and {self.new_tokens} new tokens"
        kind = f" ({self.texts})" if self.texts else ""
        precision = "as saved" if self.dtype == "auto" else f"in {self.dtype}"
        return f"{self.experiment}{kind}: {self.pair} {precision}, {sizes}{warped}"


def median_of(cell: Measured, contender: str, figure: str) -> float | None:
    """A figure of a contender; None where it was not measured."""
    value = cell["contenders"].get(contender, {}).get(figure)
    return value["median"] if isinstance(value, dict) else value


CHAT_SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
HALF: dict[str, Any] = {"dtype": "bfloat16"}
SETTINGS: dict[str, dict[str, Any]] = {  # of the cells of each experiment
    "quick": {"contenders": ("plain", "stock", "block-auto", "coupled-auto"), "new_tokens": 64},
    "speed": {"contenders": ("plain", "stock", f"stock-{GAMMA}", FIXED), "bare": BARED},
    "verifiers": {"contenders": VERIFIED, "new_tokens": 48, "repeats": 5},
    "compiled": {"contenders": ("plain", f"stock-{GAMMA}", FIXED, *COMPILED_NAMES)},
    "long": {
        "contenders": ("plain", f"stock-{GAMMA}", FIXED),
        "bare": BARED,
        "prompt_tokens": 1000,
        "new_tokens": 64,
    },
    "defaults": {"contenders": ("plain", "stock", f"stock-{GAMMA}", "block-auto"), "repeats": 5} | CHAT_SAMPLING,
    "unrelated": {"contenders": ("plain", "block-auto"), "new_tokens": 512},
    "auto": {"contenders": ("plain", "block-auto", *(f"block-{number}" for number in AUTO_NUMBERS)), "repeats": 6},
    "context": {"contenders": (FIXED,), "prompt_tokens": LONG, "new_tokens": 64, "repeats": 5},
    "memory": {"contenders": VERIFIED, "new_tokens": 256, "repeats": 1},  # many tokens, so that rows drift apart
    "temperature": {"contenders": ("plain", "block-auto")},
    "suffix": {
        "contenders": ("plain", "lookup-10", "suffix-auto", "block-auto", "several-auto"),
        "prompt_tokens": 320,
        "new_tokens": 96,
        "repeats": 5,
        "bare": ("plain", "suffix-auto"),
    },
    "exit": {"contenders": ("plain", *EXIT_NAMES, f"exit:{EXIT_LAYER}-{GAMMA}"), "new_tokens": 96, "repeats": 5},
}


def cells_of(experiment: str, pair: str, batches: Sequence[int] = (1,), **settings: Any) -> list[Cell]:
    """The cells of an experiment, one for each batch size, in its own settings but for these."""
    given = SETTINGS[experiment] | settings
    return [Cell(experiment, pair, batch=batch, **given) for batch in batches]


def temperature_cells(pair: str, batches: Sequence[int], **settings: Any) -> list[Cell]:
    """Those of all temperatures, for curves."""
    return [
        cell
        for batch in batches
        for temperature in TEMPERATURES
        for cell in cells_of("temperature", pair, (batch,), temperature=temperature, **settings)
    ]


def suffix_cells(pair: str, batches: Sequence[int] = (1, 8)) -> list[Cell]:
    """Greedy where prompts are copied; and sampled after the pair's own prompts, where little repeats."""
    copied = [x for kind in KINDS for x in cells_of("suffix", pair, batches, temperature=0.0, texts=kind)]
    return [*copied, *cells_of("suffix", pair, batches, prompt_tokens=64)]


def quick_cells(pair: str, batches: Sequence[int], names: Sequence[str], **settings: Any) -> list[Cell]:
    """A first look at a pair.

    Args:
        pair: its name.
        batches: sizes.
        names: of contenders; [] for the usual ones.
        **settings: of each cell.
    """
    cells = []
    for batch in batches:
        chosen = tuple(names) or SETTINGS["quick"]["contenders"]
        replayed = [name for name in chosen if not name.startswith(NO_REPLAY)]
        bare = tuple(name for name in replayed if not name.endswith("-compiled"))
        known = SETTINGS["quick"] | settings | {"contenders": chosen}
        cells.append(Cell("quick", pair, batch=batch, bare=bare, **known))
    return cells


def cpu_grid() -> list[Cell]:
    """What two cores can measure within half an hour."""
    small, middle = "grafted-30M", "grafted-163M"
    return [
        *cells_of("speed", small, new_tokens=192, repeats=6),  # what few texts gain is chance
        *cells_of("speed", small, (4, 8, 16), new_tokens=192),
        *cells_of("compiled", small, new_tokens=64, repeats=9),
        *cells_of("compiled", small, (8,), new_tokens=64),
        *cells_of("verifiers", small, (1, 8)),
        *cells_of("long", small),
        *cells_of("speed", middle, new_tokens=96, repeats=6, **HALF),
        *cells_of("speed", middle, (4, 8), new_tokens=96, **HALF),
        *cells_of("compiled", middle, new_tokens=64, **HALF),
        *cells_of("verifiers", middle, (1, 8), **HALF),
        *cells_of("long", middle, **HALF),
        *cells_of("defaults", "embedded", (1, 8)),
        *cells_of("defaults", "embedded", (1, 8), **HALF),
        *cells_of("defaults", "embedded", (4,)),
        *cells_of("long", "embedded", **CHAT_SAMPLING),
        *cells_of("unrelated", f"{small}-unrelated", (1, 8), repeats=2),
        *(x for pair in ("embedded", f"{small}-low", f"{small}-deep") for x in cells_of("auto", pair, new_tokens=64)),
        *(x for pair in (small, f"{small}-gqa") for x in cells_of("context", pair)),
        *cells_of("memory", small, (1, 8)),
        *temperature_cells("embedded", (1,), new_tokens=64),
        *suffix_cells("embedded"),
        *cells_of("exit", small, (1, 8)),
    ]


def gpu_grid() -> list[Cell]:
    """The same with models of sizes that people use."""
    sizes = (1, 2, 4, 8, 16, 32)
    one, seven = "grafted-1B", "grafted-7B"
    return [
        *(
            x
            for pair in (one, seven)
            for e in ("speed", "compiled", "verifiers")
            for x in cells_of(e, pair, sizes, **HALF)
        ),
        *(x for pair in (one, seven) for x in cells_of("long", pair, **HALF)),
        *cells_of("defaults", "embedded", (1, 8, 32), **HALF),
        *cells_of("unrelated", f"{one}-unrelated", (1, 8), **HALF),
        *(x for pair in (one, f"{one}-low", f"{one}-deep") for x in cells_of("auto", pair, (1, 8), **HALF)),
        *(x for pair in (one, seven) for x in cells_of("context", pair, **HALF)),  # 4 query heads for each of the keys
        *cells_of("memory", one, (1, 8, 32), **HALF),
        *temperature_cells("embedded", (1, 8)),
        *temperature_cells(one, (1,), **HALF),
    ]
