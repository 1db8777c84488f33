#!/usr/bin/env bash
# Run core tests with the oldest supported versions of all dependencies.   bash scripts/test_lower_bounds.sh [ARGUMENTS OF PYTEST]
# The environment (7 GB) is created in build/lower-bounds and kept for the next run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
PYTHON=${PYTHON:-python3.10 python3} # the first that runs: the oldest supported Python if it is installed
PYTHON=$(find_python)
env="$ROOT/build/lower-bounds"
mkdir -p "$ROOT/build"
[ -x "$env/bin/python" ] || "$PYTHON" -m venv "$env"
PIP_NO_CACHE_DIR=1 "$env/bin/python" -m pip install --quiet --constraint "$ROOT/scripts/lower-bounds.txt" \
    "$ROOT[demo,tables,hdf5]" "pytest>=8" pytest-timeout hypothesis
"$env/bin/python" -m pip check

# Old versions of the dependencies print warnings of their own, so warnings are no errors here.
cd "$ROOT"
export OMP_NUM_THREADS=1 PYTHONPATH="$ROOT"
exec "$env/bin/python" -m pytest -o filterwarnings=default -m "not slow and not alone" \
    tests/order tests/shards tests/memory tests/reader tests/loader/test_loader.py tests/loader/test_selection.py \
    tests/decode/test_fields.py tests/conversion/test_converting.py tests/conversion/test_tables.py \
    tests/training/test_user_objects.py tests/test_lower_bounds.py "$@"
