#!/usr/bin/env bash
# The demo, then lint, types, the whole test suite, and a part of it on the oldest transformers. With arguments, which go to
# pytest: lint, types and these tests alone.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
[ $# -gt 0 ] || bash "$here/demo.sh" --max-new-tokens 16 --repeats 1
source "$here/environment.sh"
python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
ruff check .
ruff format --check .
mypy &
types=$!
python -m pytest --numprocesses 2 --dist worksteal --durations 40 -rs "$@"
wait "$types"
[ $# -gt 0 ] || bash scripts/floor.sh
echo "$((SECONDS / 60)) minutes in all"
