#!/usr/bin/env bash
# The bench's grid on this machine, its tables and figures into scripts/results, taken up where it ended; --full is for
# a GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m pip install --quiet --disable-pip-version-check --editable ".[cli,plots]"
name=cpu grid=--grid
if [ "${1:-}" = --full ]; then
    name=full grid=--full
    shift
fi
mkdir -p scripts/results
specx bench "$grid" --out "scripts/results/$name.json" --plots "scripts/results/$name" "$@"
python scripts/bench_tables.py "scripts/results/$name.json" > "scripts/results/$name.md"
