#!/usr/bin/env bash
# All checks, from nothing: style, types, tests.   bash scripts/test.sh [words for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
setup dev
cd "$ROOT"
python="$VENV/bin/python"
"$python" -m ruff check .
"$python" -m ruff format --check --quiet . || fail "The formatter would change files. Run: .venv/bin/python -m ruff format"
"$python" -m mypy
exec "$python" -m pytest "$@"
