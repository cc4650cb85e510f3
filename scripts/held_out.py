"""Prompts that the pair in the package was not trained on: the first tokens of functions in held-out files."""

import ast
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from train_pair import read, source_files
from transformers import PreTrainedTokenizerBase


class Prompt(NamedTuple):
    """The first tokens of a function, the tokens that really follow, and its file and line."""

    text: str
    follows: str
    place: str


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """The line and source of each function of a file, without functions inside of others."""
    (text,) = read([path])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    lines, last = text.split("\n"), 0  # as the parser counts them; `splitlines` ends lines at form feeds as well
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.lineno > last:
            last = node.end_lineno or node.lineno
            yield node.lineno, "\n".join(lines[node.lineno - 1 : last])


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int, new_tokens: int
) -> list[Prompt]:
    """Prompts from the held-out files in turns; none of them also occurs in a file that the pair was trained on.

    Args:
        tokenizer: of the pair.
        count: how many prompts.
        prompt_tokens, new_tokens: lengths of the prompt, and of what follows it in the same function.

    Raises:
        ValueError: there are not that many.
    """
    root, total = Path(sysconfig.get_path("stdlib")), prompt_tokens + new_tokens
    trained_on, held_out = source_files()
    known = "\n".join(read(trained_on))

    def prompts_of(path: Path) -> Iterator[Prompt]:
        for line, source in functions(path):
            ids = tokenizer(source, add_special_tokens=False)["input_ids"][:total]
            text, follows = str(tokenizer.decode(ids[:prompt_tokens])), str(tokenizer.decode(ids[prompt_tokens:]))
            again = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) == total and again == ids[:prompt_tokens] and text not in known:
                yield Prompt(text, follows, f"{path.relative_to(root).as_posix()}:{line}")

    by_turns = chain.from_iterable(zip_longest(*map(prompts_of, held_out)))
    found = list(islice((prompt for prompt in by_turns if prompt is not None), count))
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} held-out functions of {total} tokens were found for {count} prompts; ask for fewer "
            "prompts or tokens."
        )
    return found
