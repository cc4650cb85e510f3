#!/usr/bin/env bash
# The demo, then lint, types and the whole test suite; arguments go to pytest.
set -euo pipefail
bash "$(dirname "${BASH_SOURCE[0]}")/demo.sh"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
ruff check .
ruff format --check .
mypy
python -m pytest --numprocesses 2 --durations 10 -rs "$@"
bash "$(dirname "${BASH_SOURCE[0]}")/floor.sh"
