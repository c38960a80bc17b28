#!/usr/bin/env bash
# Sets the environment up and runs every test. usage: bash ci/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare_environment
cd "$ROOT"
unset ESGRPO_ENABLE ESGRPO_PREFIX ESGRPO_FEATURES ESGRPO_SEGMENT  # tests set what they need

say "lint"
"$PYTHON" -m ruff check --quiet .
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
# One pytest process: its closing line counts everything. Order: cheap first, real runs last.
exec "$PYTHON" -m pytest -q --durations=15 \
    ci/tests/unit ci/tests/property ci/tests/contract ci/tests/ray ci/tests/engine ci/tests/e2e
