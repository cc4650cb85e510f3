# Makes the virtual environment that the other scripts run in, and enters it; sourced, not run.
# SPECX_VENV: where (.venv). SPECX_TORCH: which torch. SPECX_TORCH_INDEX: a package index for it, if not pip's own.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 TOKENIZERS_PARALLELISM=false
venv="${SPECX_VENV:-.venv}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
source "$venv/bin/activate"
# torch first and by itself, or another requirement brings in a build of several gigabytes
python -m pip install --quiet --disable-pip-version-check \
    ${SPECX_TORCH_INDEX:+--index-url "$SPECX_TORCH_INDEX"} "${SPECX_TORCH:-torch==2.13.0}"
