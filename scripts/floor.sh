#!/usr/bin/env bash
# On the oldest transformers that pyproject.toml allows, laid over the environment (torch and Python stay as they are): its
# contract, and the tokens of plain `generate`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
oldest="$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
folder="build/transformers-$oldest"
if [ ! -d "$folder" ]; then
    python -m pip install --quiet --disable-pip-version-check --upgrade --target "$folder.part" "transformers==$oldest"
    mv "$folder.part" "$folder"
fi
# without tests of types that are refused on it (LATER in architectures.py), and of a Hub's cache that is laid out by hand, which
# its older huggingface_hub does not read offline; nor the law by the loop of plain `generate`, of which the greedy text is enough
PYTHONPATH="$folder" python -m pytest --numprocesses 2 --durations 5 \
    -k "not single_steps and not a_draft_elsewhere and not in_the_cache_of_the_call and not come_from_elsewhere and not loop_law and not sampled_law" "$@" \
    tests/house/test_transformers_contract*.py \
    tests/generate/test_equality.py tests/generate/test_behaviours*.py tests/sampling/test_processors.py \
    tests/sampling/test_stopping.py tests/drafting/test_candidates.py tests/models/test_encoder_decoder.py \
    tests/models/test_choose.py tests/hub/test_find_draft.py tests/pairs/test_pair_loading.py \
    tests/hub/test_saving.py
