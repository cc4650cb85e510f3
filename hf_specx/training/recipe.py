"""The options of a training: loss, sampling, number of texts and steps. Nothing here imports torch."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from hf_specx.bench.checks import check_sampling
from hf_specx.common.errors import brief, check_names, is_int, require, require_option


LOSS_NAMES = ("jsd", "total_variation")  # see `losses`
COUNTS = """
    max_new_tokens phases texts_per_phase passes patience batch_size num_draft_tokens draft_vocab_size
""".split()  # noqa: SIM905
RATES = {"draft": 0.05, "layers": 0.4, "lora": 0.4, "head": 2.0}  # largest, times the hidden size of the draft
SET_BY_DISTILL = """
    output_dir num_train_epochs max_steps per_device_train_batch_size learning_rate seed eval_strategy eval_on_start
    eval_delay save_strategy save_only_model load_best_model_at_end metric_for_best_model remove_unused_columns
    train_sampling_strategy restore_callback_states_from_checkpoint label_smoothing_factor
    dataloader_persistent_workers
""".split()  # noqa: SIM905
SHARDING_OPTIONS = ("fsdp", "fsdp_config", "deepspeed")


@dataclass(frozen=True)
class TrainingRecipe:
    """All options of `distill`.

    Attributes:
        loss: one of `LOSS_NAMES`; "jsd" is the best in the table of scripts/results/cpu.md.
        do_sample, temperature, top_p, top_k: how text will be generated with the pair. The target writes with them,
            and the draft learns its distribution after them; with `do_sample=False` that is its argmax.
        max_new_tokens: the longest text that the target writes after a prompt.
        phases: how often the target writes new texts with the draft of the moment; after each the draft is trained,
            judged on held-out prompts, and saved.
        texts_per_phase: new texts of a phase.
        passes: how many times as many texts are trained on in a phase, the new ones once and others drawn from all so
            far; 32 for a new head, whose steps cost little, unless it is given.
        patience: training stops after so many phases in a row without a new best α.
        learn_from_prompts: whether the draft also learns what the target says inside the prompts: more to learn from
            for each text that is written, best with prompts that are text of the kind that will be generated.
        batch_size: texts of a training step on one device.
        num_draft_tokens: candidates of a round. A new DSpark head has blocks of so many. An EAGLE-3 head is trained
            on so many, each from its own states after those before it (its training-time test, arXiv 2503.01840). The
            result gives tokens a round for so many.
        draft_vocab_size: tokens that a new head scores, those that are most frequent in prompts and texts.
        learning_rate: the largest, after a short warm-up; it then falls linearly to 0. None is one of `RATES` over the
            hidden size of the draft: one that is trained already, layers of the target, LoRA, or a new head.
        lora: rank of LoRA on all linear layers of the draft, merged into it at the end; None trains all weights.
        seed: of all random numbers.
        training: further arguments of transformers' `TrainingArguments`, such as {"bf16": True,
            "gradient_accumulation_steps": 4}; `distill` also takes a `TrainingArguments`, whose folder is not used.

    Raises:
        ValueError: an option is unknown, out of range, or contradicts another.
    """

    loss: str = "jsd"
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    phases: int = 20
    texts_per_phase: int = 64
    passes: int = 4
    patience: int = 4
    learn_from_prompts: bool = False
    batch_size: int = 8
    num_draft_tokens: int = 5
    draft_vocab_size: int = 32000
    learning_rate: float | None = None
    lora: int | None = None
    seed: int = 0
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: dict[str, Any]) -> "TrainingRecipe":
        """A recipe with these options and the defaults of the others."""
        names = [option.name for option in fields(cls)]
        check_names("distill", options, names, f"options: {', '.join(names)}.")
        return cls(**options)

    def __post_init__(self) -> None:
        require(
            self.loss in LOSS_NAMES,
            f"loss={brief(self.loss)} is unknown; choose one of {', '.join(LOSS_NAMES)}.",
        )
        check_sampling(self.temperature, self.top_p, self.top_k)
        samples = (self.temperature, self.top_p, self.top_k) != (1, 1, 0)
        require(
            self.do_sample or not samples, "do_sample=False draws nothing; leave temperature, top_p and top_k out."
        )
        for name in COUNTS:
            value = getattr(self, name)
            require_option(is_int(value) and value >= 1, name, value, "is not an int of 1 or more; give one.")
        require(
            isinstance(self.learn_from_prompts, bool),
            f"learn_from_prompts={brief(self.learn_from_prompts)} is neither True nor False.",
        )
        require(
            is_int(self.seed) and 0 <= self.seed < 2**32,
            f"seed={brief(self.seed)} is not an int of 0 or more, and below 2**32; give one.",
        )
        require(
            self.lora is None or (is_int(self.lora) and self.lora >= 1),
            f"lora={brief(self.lora)} is no rank; give an int of 1 or more, like 16.",
        )
        rate = self.learning_rate
        require(
            rate is None or (isinstance(rate, int | float) and 0 < rate < math.inf),
            f"learning_rate={brief(rate)} is no number above 0.",
        )
        require(
            isinstance(self.training, dict),
            f"training={brief(self.training)} is neither a TrainingArguments nor a dict of its arguments.",
        )
        for name in self.training:
            require(name not in SET_BY_DISTILL, f"training={{{name!r}: ...}} is set by distill, by its own options.")
            require(
                name not in SHARDING_OPTIONS,
                f"training={{{name!r}: ...}}: the draft is whole on each device, since every process writes texts "
                "with it; leave it out, and lower batch_size or use lora if memory is short.",
            )

    @property
    def generate_options(self) -> dict[str, Any]:
        """The arguments of `generate`, also those that turn options off, which the model's config may turn on."""
        options: dict[str, Any] = {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens}
        if self.do_sample:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return options

    def rate(self, hidden_size: int, start: str) -> float:
        """The learning rate after the warm-up, for a draft of this width; `start` is a key of `RATES`."""
        kind = "lora" if self.lora is not None else start
        return RATES[kind] / hidden_size if self.learning_rate is None else self.learning_rate
