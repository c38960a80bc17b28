#!/usr/bin/env bash
# Sets the environment up and runs every test. usage: bash ci/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare_environment
cd "$ROOT"
unset ESGRPO_ENABLE ESGRPO_PREFIX ESGRPO_FEATURES ESGRPO_SEGMENT  # tests set what they need

# Tests skip where an upstream is missing, for developers without the stack. Here nothing may be skipped that way.
for upstream in torch transformers ray verl vllm omegaconf transfer_queue hydra tensorboard matplotlib rich datasets \
        numpy pandas pyarrow pydantic torchdata yaml zmq; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$upstream') is None)" ||
        die "test: $upstream is not installed in $VENV | wanted the whole stack | tests would be skipped in silence | remove $VENV and run again"
done

say "lint"
"$PYTHON" -m ruff check --quiet .
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
# Real runs last. The first group shares no Ray, and its engines have a core each: two processes, a file in one of them;
# the longest files come first, or one process waits for the other at the end: in the order given here, as xdist would
# begin with the files of the most tests, and those with real starts have the fewest. What is marked `long` (carry-over
# under colocate_async with its restart, two replicas, a reward function that raises, an engine that is killed) runs in
# the cells of ci/matrix.sh only: no time for it here.
PARALLEL=(-n 2 --dist loadfile --no-loadscope-reorder)
"$PYTHON" -m pytest -q --durations=25 -m "not long" "${PARALLEL[@]}" \
    ci/tests/engine ci/tests/contract ci/tests/unit ci/tests/property
# A start of verl imports the same libraries in ten processes, one after another: two starts at a time share the cores.
# The longest files come first, each by its name: pytest would take a file's directory, named as well, in its stead.
mapfile -t REAL < <(printf '%s\n' ci/tests/e2e/test_{elastic,v1,fully_async}.py \
    ci/tests/ray/test_{hccl_collective,routing_actors,server_slots}.py ci/tests/{e2e,ray}/test_*.py | awk '!seen[$0]++')
"$PYTHON" -m pytest -q --durations=15 -m "not long" "${PARALLEL[@]}" "${REAL[@]}"
say "matrix: patch sets and hook contracts on every pinned release"
exec "$PYTHON" -m ci.matrix --fast
