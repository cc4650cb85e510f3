"""The model `hf-specx` of lm-eval, whose texts are drafted: `specx lm-eval --model hf-specx ...` knows it, and whoever
imports this. It needs lm-eval."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from hf_specx.common.drafts import PAIR_CONFIG_NAME, read_draft
from hf_specx.common.errors import require
from hf_specx.drafting.heads.detect_head import holds_head
from hf_specx.engine.check_inputs import MAX_SEED
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.requests import Request
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.fetch import find_draft_files, get_files, get_pair, get_tokenizer
from hf_specx.hub.find_draft import draft_of_pair
from hf_specx.hub.known_pairs import folder_of
from hf_specx.hub.pair_models import find_model


NAME = "hf-specx"
OF_REPORT = ("alpha", "acceptance_rate", "tokens_per_round", "emitted")  # what results of lm-eval say of it


@register_model(NAME)
class SpeculativeLM(HFLM):
    """lm-eval's own model of transformers, but for `generate_until`: texts are drafted, in batches of any size.

    Loglikelihoods are those of the target alone. A greedy text is that of the target up to rounding, whatever the
    draft; sampled ones follow from the seed of lm-eval, and not from batches.

    Args:
        pretrained: id or folder of a target, or of a pair, whose draft and options are then taken; "embedded" is the
            pair in the package.
        draft: as `SpeculativeDecoding` takes it by name: an id or folder, "suffix", "exit:4", "head:NAME".
        num_draft_tokens, verification, layout: of `SpeculativeDecoding`; those of the pair unless given.
        revision, tokenizer, trust_remote_code, **kwargs: as of the model "hf", such as dtype, device, batch_size.

    Raises:
        ValueError: there is no draft, it fits the target not at all, or a request cannot be served.
    """

    def __init__(
        self,
        pretrained: str,
        draft: str | None = None,
        num_draft_tokens: str | int | None = None,
        verification: str | None = None,
        layout: str | None = None,
        revision: str | None = "main",
        tokenizer: Any = None,
        trust_remote_code: bool | None = False,
        **kwargs: Any,
    ):
        typed = {"num_draft_tokens": num_draft_tokens, "verification": verification, "layout": layout}
        options: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
        commit = None if revision in (None, "main") else revision
        pretrained = folder_of(pretrained)
        is_pair = (get_files(pretrained, commit).root / PAIR_CONFIG_NAME).is_file()
        require(
            is_pair or draft is not None,
            f"pretrained={pretrained} is a model and no pair; name a draft for it, as draft=suffix, which needs no "
            "second model.",
        )
        place, hub_revision = pretrained, revision
        if is_pair:  # its target may be elsewhere, and its files are checked
            files, config = get_pair(pretrained, commit)
            target = find_model(files, config, "target", {}, bool(trust_remote_code), True)
            tokenizer = tokenizer or get_tokenizer(files, config.tokenizers, bool(trust_remote_code))
            assert target.files is not None
            place, hub_revision = str(target.files.folder), "main"
        trust = {"trust_remote_code": trust_remote_code}
        super().__init__(place, revision=hub_revision, tokenizer=tokenizer, **trust, **kwargs)
        if draft is None:
            loaded, recommended, costs = draft_of_pair(self.model, pretrained, commit, {})
            options = recommended | options | {"costs": costs}
            self.speculative = SpeculativeDecoding(loaded, **options)
        else:
            options |= {"tokenizer": self.tokenizer, "draft_tokenizer": tokenizer_of_draft(draft)}
            self.speculative = SpeculativeDecoding(draft, **options)
            self.speculative.load(self.model)
        self.report: SpeculationReport | None = None  # of all texts so far

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each request after its context, without the string that ended it."""
        groups: dict[str, list[int]] = {}  # numbers of requests, by the options that they are generated with
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="generate_until, drafted") as bar:
            for numbers in groups.values():
                contexts = [requests[number].args[0] for number in numbers]
                for index, text in self._texts(contexts, requests[numbers[0]].args[1]):
                    texts[numbers[index]] = text
                    self.cache_hook.add_partial("generate_until", requests[numbers[index]].args, text)
                    bar.update(1)
        return texts

    def _texts(self, contexts: list[str], asked: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """The texts after contexts, each with its number, as soon as it is known; `asked` is what the task wants."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        limit = options.pop("max_gen_toks")
        longest = self.max_length if self.backend == "seq2seq" else self.max_length - limit
        require(
            longest > 0,
            f"max_gen_toks={limit} leaves no room for a context in the {self.max_length} positions of the target; "
            "give fewer.",
        )
        if not options["do_sample"]:
            options.pop("temperature", None)
        prompts = []
        for context in contexts:
            ids, _ = self.tok_batch_encode([context], left_truncate_len=longest, truncation=self.truncation)
            prompts.append(ids[0].tolist() or [self.prefix_token_id])
        total = options.pop("max_length", None)  # with the context
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))  # the longest first
        seeds = torch.randint(MAX_SEED // 2, (len(prompts),), device="cpu").tolist()
        waiting = [
            Request(
                prompts[number],
                seed=seeds[number],
                max_new_tokens=limit if total is None else max(1, total - len(prompts[number])),
            )
            for number in order
        ]
        batch_size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        strings = [string for string in until if string not in ("", end)]
        options |= {"tokenizer": self.tokenizer, "stop_strings": strings or None, "max_new_tokens": limit}
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            for completion in self.speculative.generate_many(
                self.model, waiting, batch_size=int(batch_size), **options
            ):
                number = order[completion.index]
                if completion.tokens is None:
                    raise ValueError(
                        f"a context of {len(prompts[number])} tokens cannot be served: {completion.error}"
                    )
                yield number, self._cut(completion.tokens, until)
        report = self.speculative.report
        if report is not None:
            self.report = report if self.report is None else self.report + report

    def _cut(self, tokens: list[int], until: list[str]) -> str:
        """What was generated as a text, behind what was thought and up to a stop string."""
        end_of_thinking = self.think_end_token
        if isinstance(end_of_thinking, int):
            later = tokens[::-1]
            has_thought = end_of_thinking in later
            text = str(
                self.tok_decode(tokens[len(tokens) - later.index(end_of_thinking) :] if has_thought else tokens)
            )
            return str(postprocess_generated_text(text.lstrip(), until, None))
        return str(postprocess_generated_text(self.tok_decode(tokens), until, end_of_thinking))

    def get_model_info(self) -> dict[str, Any]:
        """What results say of the model: also what was drafted."""
        report = self.report
        figures = {} if report is None else {name: getattr(report, name) for name in OF_REPORT}
        return super().get_model_info() | {"speculation": {"strategy": repr(self.speculative)} | figures}


def tokenizer_of_draft(name: str) -> Any:
    """The tokenizer of a draft model in its own folder or repository; None of what reads the target's tokens."""
    model = read_draft(name).model if not Path(name).is_dir() else name
    if model is None:
        return None
    files = find_draft_files(model)
    return None if holds_head(files) else get_tokenizer(files, None, trust_remote_code=False)
