#!/usr/bin/env bash
# All checks, from nothing: style, types, tests.   bash scripts/test.sh [words for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
setup dev
cd "$ROOT"
python="$VENV/bin/python"

# nginx of Debian's packages for the tests of HTTP, unpacked into .venv and not installed; without it they say what is missing
if [ ! -x "$VENV/nginx/usr/sbin/nginx" ] && command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    mkdir -p "$VENV/nginx/lists/partial"
    (
        cd "$VENV/nginx"
        own="-o Dir::State::Lists=$VENV/nginx/lists"
        timeout 60 apt-get -qq download nginx || { timeout 60 apt-get -qq $own update && timeout 60 apt-get -qq $own download nginx; }
        dpkg -x nginx_*.deb . && rm -f nginx_*.deb
    ) >/dev/null 2>&1 || true
fi

"$python" -m ruff check .
"$python" -m ruff format --check --quiet . || fail "The formatter would change files. Run: .venv/bin/python -m ruff format"
"$python" -m mypy
# a process per core, and one thread of torch's in each: two that share two cores wait for each other more than they work
export OMP_NUM_THREADS=1
check() { "$python" -m pytest "$@" || [ $? -eq 5 ]; } # 5: the words for pytest left none of these tests
beside=(--numprocesses auto --dist worksteal)
check "${beside[@]}" -m "not slow and not alone" "$@"
check -m "alone and not slow" "$@"
if [ -n "${CI:-}" ]; then # what takes long, for nobody waits there
    check "${beside[@]}" -m "slow and not alone" "$@"
    check -m "slow and alone" "$@"
fi
