#!/usr/bin/env bash
# Install if needed, then check style and types and run the tests.   bash scripts/test.sh [ARGUMENTS OF PYTEST]
# With CI=1 in the environment, slow tests and the check of the wheel run, too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup dev
cd "$ROOT"
python="$VENV/bin/python"

# Some HTTP tests need nginx. Debian's package is unpacked into .venv, not installed. Without nginx these tests are skipped.
if [ ! -x "$VENV/nginx/usr/sbin/nginx" ] && command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    mkdir -p "$VENV/nginx/lists/partial"
    (
        cd "$VENV/nginx"
        lists="-o Dir::State::Lists=$VENV/nginx/lists"
        timeout 60 apt-get -qq download nginx ||
            { timeout 60 apt-get -qq $lists update && timeout 60 apt-get -qq $lists download nginx; }
        dpkg -x nginx_*.deb . && rm -f nginx_*.deb
    ) >/dev/null 2>&1 || true
fi

"$python" -m ruff check .
"$python" -m ruff format --check --quiet . || fail "Some files are not formatted. Run: .venv/bin/python -m ruff format"
"$python" -m mypy

# Tests run in one process per core with one torch thread each: more threads than cores wait for each other.
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # without compiled files, every process that a test starts compiles the package anew
check() { "$python" -m pytest "$@" || [ $? -eq 5 ]; } # exit status 5: the arguments select none of these tests
parallel=(--numprocesses auto --dist worksteal)
check "${parallel[@]}" -m "not slow and not alone" "$@"
# These run one at a time. Pytest imports each file that it looks into, so only files with such tests are named.
alone=("$@")
[ $# -gt 0 ] || mapfile -t alone < <(grep -rlF --include="*.py" pytest.mark.alone tests)
if [ -z "${CI:-}" ]; then
    check -m "alone and not slow" "${alone[@]}"
else
    check -m alone "${alone[@]}"
    check "${parallel[@]}" -m "slow and not alone" "$@"
    bash scripts/check_wheel.sh
fi
