#!/usr/bin/env bash
# The tests marked gpu and the speeds of synthetic pairs on this CUDA machine, within nine minutes, with the python that
# is found here and nothing installed: torch, transformers, accelerate, pytest. Results: build/gpu, or the folder named.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
out="${1:-build/gpu}"
python="$(command -v python || command -v python3)"
mkdir -p "$out"
"$python" -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)" | tee "$out/machine.txt" || exit 1
# files without such tests are not imported, since they may need what is not here
timeout 210 "$python" -m pytest -v -m gpu --tb=short --continue-on-collection-errors -p no:cacheprovider \
    $(grep -lE "mark\.gpu|on_device" tests/*/test_*.py) | tee "$out/tests.txt"
tests=$?
bench() {  # PAIR SECONDS CONTENDER ...
    timeout "$2" "$python" scripts/grafted.py "$1" --dtype bfloat16 --repeats 3 --method "${@:3}" | tee -a "$out/speed.md"
}
bench 7B 90 plain assisted-5 block-5 block-auto
bench 1B 60 plain assisted-5 block-5 block-auto
bench 7B 110 plain plain-compiled block-5-compiled
bench 1B 70 plain plain-compiled block-5-compiled
exit "$tests"
