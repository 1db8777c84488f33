#!/usr/bin/env bash
# Install if needed, then check style and types and run the tests.   bash scripts/test.sh [ARGUMENTS OF PYTEST]
# With CI=1 in the environment, slow tests and the check of the wheel run, too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup dev
cd "$ROOT"
python="$VENV/bin/python"

# Each check sees what it sees on a new machine: no variable but these. PIP_* and PYTHON serve the installation only.
bare=(env -i "HOME=$HOME" "PATH=$PATH" ${CI:+"CI=$CI"})

# Some HTTP tests need nginx. Debian's package is unpacked into .venv, not installed.
unpack_nginx() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    mkdir -p "$VENV/nginx/lists/partial"
    timeout 10 "${bare[@]}" bash -c '
        cd "$1" && own="-o Dir::State::Lists=$1/lists" # without root the lists of the machine cannot be updated
        apt-get -qq download nginx || { apt-get -qq $own update && apt-get -qq $own download nginx; }
        rm -rf new && dpkg -x nginx_*.deb new && mv new/usr . && rm -rf new nginx_*.deb' - "$VENV/nginx" >/dev/null 2>&1
}
if [ ! -x "$VENV/nginx/usr/sbin/nginx" ] && ! command -v nginx >/dev/null && ! unpack_nginx; then
    printf 'Tests with nginx are skipped: it was not unpacked within 10 s. To run them: apt install nginx\n' >&2
fi

"${bare[@]}" "$python" -m ruff check .
"${bare[@]}" "$python" -m ruff format --check --quiet . || fail "Some files are not formatted. Run: .venv/bin/python -m ruff format"
"${bare[@]}" "$python" -m mypy

check() { "${bare[@]}" "$python" -m pytest "$@" || [ $? -eq 5 ]; } # exit status 5: the arguments select none of these tests
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
