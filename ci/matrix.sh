#!/usr/bin/env bash
# Runs every cell of the compatibility matrix that this machine can. usage: bash ci/matrix.sh [--fast] [--only CELL,...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare_environment
cd "$ROOT"
unset ESGRPO_ENABLE ESGRPO_PREFIX ESGRPO_FEATURES ESGRPO_SEGMENT
exec "$PYTHON" -m ci.matrix "$@"
