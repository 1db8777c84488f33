#!/usr/bin/env bash
# Build sdist and wheel, and run the demo from the wheel where there is no compiler.   bash scripts/check_wheel.sh
# The new environment contains the wheel alone. Its dependencies are those of .venv, so that torch is not installed twice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The wheel is built from the sdist, so the sdist is complete, too.
"$VENV/bin/python" -m build --no-isolation --outdir "$work/dist" "$ROOT" >"$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; fail "The build failed."; }
wheel=$(echo "$work"/dist/*.whl)
case $wheel in
    *-py3-none-any.whl) fail "$wheel has no compiled kernels." ;;
esac

"$VENV/bin/python" -m venv --without-pip "$work/env"
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$VENV/bin/python" -m pip --python "$work/env/bin/python" install --quiet --no-deps --no-index "$wheel"
# The folders of a .pth file come after the environment's own, so the wheel's package is the one that is imported.
"$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/dependencies.pth"

# env -i: no CC and no PYTHONPATH. The path has no compiler.
mkdir "$work/home"
cd "$work/home"
env -i PATH="$work/env/bin" HOME="$work/home" OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" "$work/env/bin/python" - "$site" <<'PYTHON'
import shutil
import sys

import wdstrain
from wdstrain.native import kernels

assert not any(map(shutil.which, ("cc", "gcc", "clang"))), "a compiler is on the path"
assert wdstrain.__file__.startswith(sys.argv[1]), wdstrain.__file__
assert kernels.library is not None, "the kernels were not loaded"
PYTHON
env -i PATH="$work/env/bin" HOME="$work/home" OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" \
    "$work/env/bin/wdstrain" demo --dir "$work/home/demo" >"$work/demo.txt" 2>&1 ||
    { cat "$work/demo.txt" >&2; fail "The demo failed."; }
if grep -i "warning\|compiled part" "$work/demo.txt" >&2; then fail "The demo logged a warning."; fi
grep accuracy "$work/demo.txt" | tail -n 1
printf '%s: the kernels are loaded, the demo ran without a compiler\n' "$(basename "$wheel")"
