#!/usr/bin/env bash
# One command: sets up .venv with this package in it, trains plain fully-async GRPO and the same with the overlay,
# prints the comparison.
# usage: bash bench/quickstart.sh [--model smollm2] [--budget SECONDS] [--seed N] [--out DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ci/env.sh"
case " $* " in
    *smollm2*) MINIMUM_MEMORY_GIB=12 ;;  # all of its processes took 11.7 GB
esac
prepare_environment
install_package
exec "$PYTHON" -m bench.quickstart "$@"
