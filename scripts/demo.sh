#!/usr/bin/env bash
# The main job on real input, from nothing: digits -> shards -> training -> figures.   bash scripts/demo.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
setup demo
cd "$ROOT"
exec "$VENV/bin/python" -m wdstrain demo "$@"  # not bin/wdstrain: a clone may be moved
