#!/usr/bin/env bash
# The tests marked gpu and the speeds of synthetic pairs on this CUDA machine, within nine minutes, with the python that
# is found here and nothing installed: torch, transformers, accelerate, pytest. Arguments: see scripts/gpu.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$(command -v python || command -v python3)" scripts/gpu.py "$@"
