#!/usr/bin/env bash
# Applies the patch set of a pinned upstream release to a source checkout; no network, nothing is installed.
# usage: ./apply.sh [--check|--status|--reverse|--list] [--only SLUG,...] [--installed] CHECKOUT   (--help: exit codes)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for PYTHON in ${ESGRPO_PYTHON:-python3 python}; do
    if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        PYTHONPATH="$ROOT/overlay${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m esgrpo.tools.apply "$@"
    fi
done
echo "esgrpo: apply.sh: no Python 3.10 or newer | wanted python3 on PATH | nothing was changed | install it or set ESGRPO_PYTHON" >&2
exit 2
