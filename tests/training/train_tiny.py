"""A short training in a process of its own, by `python` or `torchrun`: the folder, where the weights go, options."""

import json
import os
import signal
import sys

import torch
from safetensors.torch import save_file
from training_cases import trained
from transformers import TrainerCallback

from hf_specx.pairs.shares import processes


class Kill(TrainerCallback):
    """Ends the process in a step, as the system does when memory runs out."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, out: str, options: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(options)
    callbacks = [Kill(given.pop("kill"))] if "kill" in given else []
    result = trained(folder=folder, callbacks=callbacks, **given)
    found = {name: weight.clone() for name, weight in result.pair.draft.state_dict().items()}
    save_file(found, f"{out}-{processes().process_index}", {"alphas": json.dumps(result.alphas)})


if __name__ == "__main__":
    main(*sys.argv[1:])
