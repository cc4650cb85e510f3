"""A process that loads pairs by their id, without the package until it is installed; run as a script, see `users`."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


SETTINGS = {"do_sample": True, "max_new_tokens": 20, "top_k": 0}
SUPPORT = Path(__file__).parents[1] / "support"


def said(generate: Any, target: Any, **options: Any) -> list[list[int]]:
    """The tokens after the prompts, of a call that must have speculated."""
    import torch
    from tiny import Forwards, prompts

    torch.manual_seed(0)
    with Forwards(target) as forwards:
        output = generate(**prompts(2), **SETTINGS, **options)
    assert len(forwards.ids) < SETTINGS["max_new_tokens"]
    return output[:, prompts(2)["input_ids"].shape[1] :].tolist()


def by_package(name: str, **options: Any) -> list[list[int]]:
    from hf_specx import DraftTargetPair

    pair = DraftTargetPair.from_pretrained(name, **options)
    return said(pair.generate, pair.target)


def by_function(name: str, **options: Any) -> list[list[int]]:
    """The draft is found by where the target was loaded from."""
    from transformers import AutoModelForCausalLM

    from hf_specx import generate

    target = AutoModelForCausalLM.from_pretrained(name, **options)
    return said(generate, target, model=target, **options)


def by_string(name: str, target: str | None = None, **options: Any) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target or name)
    return said(model.generate, model, **{"trust_remote_code": True, "custom_generate": name} | options)


def by_code(name: str, target: str, draft: str, subfolder: str = "", **options: Any) -> list[list[int]]:
    """Both models are the user's; with the tokenizers of both where they are folders of their own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target)
    options["assistant_model"] = AutoModelForCausalLM.from_pretrained(draft, subfolder=subfolder)
    if not subfolder:
        options |= {"tokenizer": AutoTokenizer.from_pretrained(target)}
        options |= {"assistant_tokenizer": AutoTokenizer.from_pretrained(draft)}
    return said(model.generate, model, custom_generate=name, trust_remote_code=True, **options)


def by_override(name: str, **options: Any) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, **{"trust_remote_code": True} | options)
    assert "generate" in vars(model)
    return said(model.generate, model)


def modules_of_repositories() -> list[str]:
    return [name for name in sys.modules if name.startswith("transformers_modules.")]


class NoPackage:
    """An importer for which the package is not installed."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name.partition(".")[0] == "hf_specx":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def install() -> None:
    """From now on the package can be imported."""
    sys.meta_path.pop(0)


def users(home: Path, jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What functions of this file, by name and arguments, return in a process of their own, or their error as a text.

    `home` is its `HF_HOME`.
    """
    ours = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HF_MODULES_CACHE"} | ours
    command = [sys.executable, __file__, json.dumps(jobs)]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, input="")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.path.insert(0, str(SUPPORT))
    sys.meta_path.insert(0, NoPackage())
    results: list[Any] = []
    for function, arguments in json.loads(sys.argv[1]):
        try:
            results.append(globals()[function](**arguments))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    print(f"\n{json.dumps(results)}")  # after the question whether to trust, which stdin does not answer
