#!/usr/bin/env bash
# Install the package into .venv of this clone. Nothing is written outside the clone.
#   bash scripts/setup.sh [EXTRA]     EXTRA: an extra of pyproject.toml (default: demo); "dev" for development
#   source scripts/setup.sh           defines setup, fail, find_python, ROOT and VENV for other scripts

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
LOCK="$ROOT/scripts/requirements.lock" # the versions with which the tests were run

fail() { printf '%s\n' "$*" >&2; exit 1; }

# Print the name of a Python that is new enough: $PYTHON if it is set, else the first on the path.
find_python() {
    local candidate version old=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14 python}; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        old="$candidate is Python $version"
    done
    [ -z "$old" ] || fail "$old: Python 3.10 or newer is needed. Install it, or name it: PYTHON=python3.12 bash scripts/..."
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON does not run. Name another Python, or unset the variable."
    fail "No Python was found: 3.10 or newer is needed. Install it (on Debian: apt install python3 python3-venv)."
}

# Print the free KB of the file system that holds folder $1.
free_kb() { df -Pk "$1" | awk 'NR == 2 { print $4 }'; }

# Print a checksum of everything that an installation depends on. $1: the Python.
checksum() {
    {
        cat "$ROOT/pyproject.toml" "$LOCK" "$ROOT/scripts/compile.py" "$ROOT/wdstrain/native/kernels.c"
        "$1" --version
        printf '%s\n' "$VENV"
    } | cksum
}

# Succeed if extra $1 is installed with checksum $2. The extra dev contains demo and docs.
is_installed() {
    local extra
    for extra in "$1" dev; do
        [ "$(cat "$VENV/installed-$extra" 2>/dev/null)" = "$2" ] && "$VENV/bin/python" -c '' 2>/dev/null && return 0
    done
    return 1
}

# End with the reason why pip failed. $1: its log.
explain_failure() {
    if grep -q 'No space left' "$1"; then
        fail "Installing failed: no space left. It needs 10 GB; 3 GB are free again afterwards." \
            "Free in $VENV: $(($(free_kb "$VENV") >> 20)) GB. Make room and run this again. Details: $1"
    fi
    if grep -qiE 'Retrying \(Retry|max retries exceeded|timed out|temporary failure in name' "$1"; then
        fail "Installing failed: the package index cannot be reached. Check the network and run this again. Details: $1"
    fi
    fail "Installing failed: $(grep -i '^error' "$1" | tail -n 1) Details: $1"
}

# Create an empty .venv with Python $1. A .venv that this script did not create is never deleted.
create_venv() {
    if [ -e "$VENV" ] && [ ! -e "$VENV/created-by-setup" ]; then
        fail "$VENV was not created by this script and does not run $("$1" --version). Move it away, or name its" \
            "Python: PYTHON=python3.12 bash scripts/..."
    fi
    printf 'Creating %s with %s\n' "$VENV" "$("$1" --version)" >&2
    rm -rf "$VENV"
    mkdir "$VENV" && touch "$VENV/created-by-setup" # first, so that an interrupted run can be repeated
    "$1" -m venv "$VENV" >/dev/null 2>&1 ||
        fail "$1 cannot create a virtual environment. Install its venv module (on Debian: apt install python3-venv)."
}

# Install the package with extra $1 into .venv; return at once if it is installed.
setup() {
    local extra=$1 python sum log="$VENV/install.log" downloads
    trap 'fail "Interrupted. Run it again to continue."' INT
    python=$(find_python) || exit 1
    sum=$(checksum "$python")
    if is_installed "$extra" "$sum"; then return 0; fi
    if [ "$("$VENV/bin/python" --version 2>/dev/null)" != "$("$python" --version)" ]; then create_venv "$python"; fi
    printf 'Installing torch and other packages into .venv (several GB, a minute or more) ...\n' >&2
    # pip needs GB for downloads, which a small /tmp does not have: use the file system with more room.
    downloads=${TMPDIR:-/tmp}
    if [ ! -d "$downloads" ] || [ "$(free_kb "$VENV")" -ge "$(free_kb "$downloads")" ]; then
        downloads="$VENV/tmp"
        rm -rf "$downloads" # an interrupted installation leaves it
        mkdir "$downloads"
    fi
    # Set by environment variables, so that the pip that pip starts for builds uses them, too.
    if ! TMPDIR="$downloads" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CACHE_DIR="$VENV/cache" PIP_RETRIES=2 \
        "$VENV/bin/python" -m pip install --constraint "$LOCK" -e "$ROOT[$extra]" >"$log" 2>&1; then
        rm -rf "$VENV/tmp"
        explain_failure "$log"
    fi
    rm -rf "$VENV/tmp"
    printf '%s\n' "$sum" >"$VENV/installed-$extra"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # run as a command, not sourced
    set -euo pipefail
    setup "${1:-demo}"
    printf 'Installed. To use it: source %s/bin/activate\n' "$VENV"
fi
