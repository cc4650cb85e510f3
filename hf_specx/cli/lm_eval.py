"""`specx lm-eval`: the command line of lm-eval, which then knows the model `hf-specx`."""

import importlib.util
import sys

import typer

from hf_specx.common.errors import require

from .console import errors_in_one_line, imports


AS_TYPED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # all is lm-eval's


def lm_eval(context: typer.Context) -> None:
    """Evaluate by lm-eval, with drafted texts: specx lm-eval --model hf-specx --model_args pretrained=T,draft=D ...

    All options are those of lm-eval. Loglikelihoods are the target's alone.
    """
    with errors_in_one_line():
        is_installed = importlib.util.find_spec("lm_eval") is not None
        require(is_installed, "specx lm-eval needs lm-eval, which is not installed; pip install lm_eval.")
        with imports():
            from lm_eval.__main__ import cli_evaluate

            from hf_specx.pairs import lm_eval_model  # noqa: F401  # which registers its model
        sys.argv = ["lm-eval", *context.args]
        cli_evaluate()
