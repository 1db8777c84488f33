# Makes .venv in the clone and installs the package there; sourced by demo.sh and test.sh.
#   ROOT: the clone; setup EXTRA: make it so, fast when it is so already. Nothing is written outside the clone.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"

fail() { printf '%s\n' "$*" >&2; exit 1; }

trap 'fail "Interrupted. Run it again to go on."' INT

# PYTHON=... if it is given, else the first Python on the path that is new enough.
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
    [ -z "$old" ] || fail "$old, which is too old: 3.10 or newer is needed. Install one, or name it: PYTHON=python3.12 bash scripts/..."
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is no Python that runs. Name another, or leave it away."
    fail "No Python was found: 3.10 or newer is needed. Install one (on Debian: apt install python3 python3-venv)."
}

# KB free where FOLDER is.
room() { df -Pk "$1" | awk 'NR == 2 { print $4 }'; }

setup() {
    local extra=$1 python stamp had log="$VENV/install.log" work
    python=$(find_python) || exit 1
    # what is installed depends on the project file, the Python and the place; dev contains demo
    stamp=$({ cat "$ROOT/pyproject.toml" "$ROOT/scripts/compile.py" "$ROOT/wdstrain/native/kernels.c"; "$python" --version; printf '%s\n' "$VENV"; } | cksum)
    for had in "$extra" dev; do
        if [ "$(cat "$VENV/installed-$had" 2>/dev/null)" = "$stamp" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
            return 0
        fi
    done
    if [ "$("$VENV/bin/python" --version 2>/dev/null)" != "$("$python" --version)" ]; then
        printf 'Creating %s with %s\n' "$VENV" "$("$python" --version)" >&2
        rm -rf "$VENV"
        "$python" -m venv "$VENV" >/dev/null 2>&1 ||
            fail "$python cannot make a virtual environment. Install its venv module (on Debian: apt install python3-venv)."
    fi
    printf 'Installing torch and more into .venv: some GB, a minute or more ...\n' >&2
    # what pip downloads lies in the clone until it is installed, not in a small /tmp; where only that one has room, there
    work=${TMPDIR:-/tmp}
    if [ ! -d "$work" ] || [ "$(room "$VENV")" -ge "$(room "$work")" ]; then
        work="$VENV/tmp"
        rm -rf "$work" # of an installation that was killed
        mkdir "$work"
    fi
    # by environment, so that it also holds for the pip that pip starts
    TMPDIR="$work" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CACHE_DIR="$VENV/cache" PIP_RETRIES=2 \
        "$VENV/bin/python" -m pip install -e "$ROOT[$extra]" >"$log" 2>&1 || {
        rm -rf "$VENV/tmp"
        if grep -q 'No space left' "$log"; then
            fail "Installing failed: no space left. It takes 10 GB, of which 3 are free again when it is done. Free" \
                "in $VENV now: $(($(room "$VENV") >> 20)) GB. Make room and run this again. Details: $log"
        fi
        if grep -qiE 'Retrying \(Retry|max retries exceeded|timed out|temporary failure in name' "$log"; then
            fail "Installing failed: the package index cannot be reached. Check the network and run this again. Details: $log"
        fi
        fail "Installing failed: $(grep -i '^error' "$log" | tail -n 1) Details: $log"
    }
    rm -rf "$VENV/tmp"
    printf '%s\n' "$stamp" >"$VENV/installed-$extra"
}
