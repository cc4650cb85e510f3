"""Where candidates come from on the kinds of prompts of Spec-Bench (2401.07851): `python scripts/draft_sources.py`.

Documentation of the standard library is to be summed up, asked about, rewritten and translated, and there is free
text. The pair in the package drafts with `[SuffixDraft(), draft model]`, greedily, 96 new tokens for each of 6 prompts
of a kind. Printed is a table with the tokens of a row's round where the candidates were of that source (in how many
percent of all rounds), and with either draft alone. A small target trained on code does not do what the prompts ask
for; what counts is how far its text repeats theirs.
"""

import copy
import fnmatch
import heapq
import inspect
import queue
import shlex
import textwrap

import torch
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair, SpeculativeDecoding, SuffixDraft


MODULES = (textwrap, heapq, shlex, fnmatch, copy, queue)
NEW_TOKENS, WORDS = 96, 120
KINDS = {
    "summary": "{text}\n\nIn short: {first}",
    "question from a text": "{text}\n\nQ: What does {name} do?\nA: {first}",
    "rewriting": "{text}\n\nThe same with shorter lines:\n\n{first}",
    "translation": "{text}\n\nEn français : ",
    "free text": "Once there was a programmer who had written {name}. ",
}


def documentation(module: object) -> str:
    """What a module says of itself and its functions."""
    told = [inspect.getdoc(module), *(inspect.getdoc(x) for x in vars(module).values() if inspect.isroutine(x))]
    return " ".join(" ".join(filter(None, told)).split()[:WORDS])


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    pair = DraftTargetPair.embedded()
    assert pair.tokenizer is not None
    assert isinstance(pair.draft, PreTrainedModel)
    target, alone = pair.target.float(), pair.draft.float()
    print("| kind | suffix | model | both together | suffix alone | model alone |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, form in KINDS.items():
        found = []
        for draft in ([SuffixDraft(), alone], SuffixDraft(), alone):
            counts: dict[str, list[int]] = {"suffix": [0, 0], "model": [0, 0], "all": [0, 0]}
            for module in MODULES:
                text = documentation(module)
                first = " ".join(text.split()[:4])
                ids = pair.tokenizer(form.format(text=text, name=module.__name__, first=first), return_tensors="pt")
                strategy = SpeculativeDecoding(draft, num_draft_tokens=5)
                given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
                target.generate(ids.input_ids, attention_mask=ids.attention_mask, **given, custom_generate=strategy)
                report = strategy.report
                assert report is not None
                counts["all"][0] += report.emitted
                counts["all"][1] += report.rounds + report.plain_steps
                for source, seen in report.sources.items():
                    counts[source][0] += seen["accepted"] + seen["rounds"]
                    counts[source][1] += seen["rounds"]
            found.append(counts)
        both = found[0]
        parts = []
        for source in ("suffix", "model"):
            tokens, rounds = both[source]
            parts.append(f"{tokens / max(1, rounds):.2f} ({100 * rounds / both['all'][1]:.0f} %)")
        whole = [f"{counts['all'][0] / counts['all'][1]:.2f}" for counts in found]
        print("|", " | ".join([kind, *parts, *whole]), "|", flush=True)


if __name__ == "__main__":
    main()
