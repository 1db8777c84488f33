#!/usr/bin/env bash
# All checks, from nothing: style, types, tests.   bash scripts/test.sh [words for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
setup dev
cd "$ROOT"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check --quiet . || fail "The formatter would change files. Run: .venv/bin/ruff format"
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest "$@"
