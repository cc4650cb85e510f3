#!/usr/bin/env bash
# The main job on the embedded pair: speculative against plain generation at batch 1 and batch 8.
set -euo pipefail
echo "Preparing a Python environment; the first time this downloads torch and takes some minutes ..."
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m pip install --quiet --disable-pip-version-check --editable ".[cli]"
specx generate --demo "$@"
