#!/usr/bin/env bash
# One command: sets up .venv with this package in it, trains plain fully-async GRPO and the same with the overlay,
# prints the comparison.
# usage: bash bench/quickstart.sh [--model testbed|smollm2] [--budget SECONDS] [--seed N] [--out DIR] [--target REWARD]
set -euo pipefail
for argument in "$@"; do  # before anything is installed
    case "$argument" in
        -h | --help) sed -n 's/^# usage: /usage: /p' "${BASH_SOURCE[0]}"; exit ;;
        --model | --budget | --seed | --out | --target) ;;
        --model=* | --budget=* | --seed=* | --out=* | --target=*) ;;
        -[0-9]*) ;;  # a number below 0, for bench.quickstart to judge
        -*)
            printf 'esgrpo: bench/quickstart.sh: %s | wanted options as --help lists them | nothing was installed | %s\n' \
                "$argument" "see bench/quickstart.sh --help" >&2
            exit 2 ;;
    esac
done
source "$(dirname "${BASH_SOURCE[0]}")/../ci/env.sh"
case " $* " in
    *smollm2*) MINIMUM_MEMORY_GIB=12 ;;  # all of its processes took 11.7 GB
esac
prepare_environment
install_package
exec "$PYTHON" -m bench.quickstart "$@"
