#!/usr/bin/env bash
# One command: sets up .venv, trains plain fully-async GRPO and the same with the overlay, prints the comparison.
# usage: bash bench/quickstart.sh [--budget SECONDS] [--seed N] [--out DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ci/env.sh"
prepare_environment
exec "$PYTHON" -m bench.quickstart "$@"
