#!/usr/bin/env bash
# The reference of all public names, from their docstrings, as pages in build/api; arguments go to pdoc.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m pip install --quiet --disable-pip-version-check --editable ".[cli,docs]"
pdoc --docformat google --output-directory build/api "$@" hf_specx
