#!/usr/bin/env bash
# Install if needed, then convert, verify and train on a small real data set.   bash scripts/demo.sh [--dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup demo
cd "$ROOT"
exec "$VENV/bin/python" -m wdstrain demo "$@" # not bin/wdstrain, whose first line names the folder of the clone at installation
