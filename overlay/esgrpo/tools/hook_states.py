"""`esgrpo status RUN_DIR`: hooks of a run, folded over its processes, or each one in each process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from esgrpo.engine import FINE, State

FAMILIAR = (State.APPLIED.value, State.NOT_NEEDED.value)


def everywhere(reports: Sequence[dict]) -> list[list[str]]:
    """Every hook in every process, the header first."""
    return [["PROCESS", "HOST", "PID", "HOOK", "STATE", "REASON"],
            *([report["process"], report["host"], str(report["pid"]), hook["slug"], hook["state"], hook["detail"]]
              for report in reports for hook in report["hooks"])]


def by_process(reports: Sequence[dict]) -> list[list[str]]:
    """How many hooks are in which state, a row a kind of process, the header first."""
    kinds: dict[str, Counter] = {}
    for report in reports:
        kinds.setdefault(report["process"], Counter()).update(hook["state"] for hook in report["hooks"])
    counts = Counter(report["process"] for report in reports)
    other = {kind: ", ".join(f"{state} {count}" for state, count in states.items() if state not in FAMILIAR)
             for kind, states in kinds.items()}
    return [["PROCESS", "COUNT", *FAMILIAR, "OTHER"],
            *([kind, str(counts[kind]), *(str(states[state]) for state in FAMILIAR), other[kind]]
              for kind, states in kinds.items())]


def folded(reports: Sequence[dict]) -> tuple[list[list[str]], int]:
    """(a row for each hook in a state that it has somewhere, the header first; hooks that are needed nowhere).

    What is not fine comes first, a row for each process with its host and id; what is NOT_NEEDED is left out.
    """
    places: dict[tuple[str, str, str], list[dict]] = {}
    for report in reports:
        for hook in report["hooks"]:
            places.setdefault((hook["slug"], hook["state"], hook["detail"]), []).append(report)
    shown = {key: where for key, where in places.items() if key[1] != State.NOT_NEEDED.value}
    rows = [[slug, state, place, detail] for (slug, state, detail), where in shown.items()
            for place in _places(where, reports, state)]
    rows.sort(key=lambda row: State(row[1]) in FINE)  # stable: otherwise as the hooks are listed
    needless = {slug for slug, *_ in places} - {slug for slug, *_ in shown}
    return [["HOOK", "STATE", "PROCESSES", "REASON"], *rows], len(needless)


def _places(where: Sequence[dict], reports: Sequence[dict], state: str) -> list[str]:
    if State(state) not in FINE:
        return [f"{report['process']} {report['host']}:{report['pid']}" for report in where]
    if len(where) == len(reports):
        return [f"all {len(reports)}"]
    counts = Counter(report["process"] for report in where)
    return [", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in counts.items())]
