#!/usr/bin/env bash
# Build the documentation site in build/site, or in DIR.   bash scripts/docs.sh [DIR]
# Broken links are errors. The site needs no server and no network: open index.html.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup docs
site=$(realpath -m "${1:-$ROOT/build/site}")
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1 # an advertisement of the theme
"$VENV/bin/python" -m mkdocs build --quiet --strict --site-dir "$site"
printf '%s pages: %s/index.html\n' "$(find "$site" -name '*.html' ! -name 404.html | wc -l)" "$site"
