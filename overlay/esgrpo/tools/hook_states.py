"""`esgrpo status RUN_DIR`: hooks of a run, folded over its processes, or each one in each process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from esgrpo.engine import FINE, State
from esgrpo.errors import EsgrpoError

FAMILIAR = (State.APPLIED.value, State.NOT_NEEDED.value)
PROCESS = {"process": str, "host": str, "pid": int, "hooks": list}
HOOK = {"slug": str, "state": str, "detail": str, "needed": bool}


def read(who: str, path: str, consequence: str) -> list[dict]:
    """What every process of a run said of its hooks. Raises EsgrpoError for anything else: nothing that is damaged
    must look like a run whose hooks are all in place."""
    try:
        with open(path, encoding="utf-8") as file:
            reports = json.load(file)
        if not (isinstance(reports, list) and reports and all(map(_is_report, reports))):
            raise ValueError("not the processes of a run and their hooks")
        return reports
    except (OSError, ValueError, RecursionError) as error:
        raise EsgrpoError(who, f"{path}: {getattr(error, 'strerror', None) or error}", "the states of hooks in JSON",
                          consequence, "start the run again, which writes it anew") from None


def _is_report(found) -> bool:
    return _has(found, PROCESS) and all(_has(hook, HOOK) and hook["state"] in State.__members__
                                        for hook in found["hooks"])


def _has(found, fields: dict[str, type]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in fields.items())


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
