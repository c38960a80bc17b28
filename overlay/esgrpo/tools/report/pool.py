"""Records that say the same about the same, joined over files.

Two training records are comparable when the same command made them on the same device: its seeds, budgets, arms and
files may differ, the overrides of an arm that both have may not. Engine records are joined as a whole, because their
tables compare runs of one setting only.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from esgrpo.tools.report.load import Record

# Options that say which of the same runs a file holds, and where they were put.
NOT_THE_WORK = ("--arms", "--seeds", "--seed", "--budget", "--out", "--results", "--model", "--jobs", "--repeats")
FACTS = ("command", "commit", "device")


def work_of(command: str) -> str:
    """The command without what does not change the work."""
    words = re.split(r"\s+", command) if command.count('"') % 2 or command.count("'") % 2 else shlex.split(command)
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in NOT_THE_WORK:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in NOT_THE_WORK)):
            kept.append(word)
    return " ".join(kept)


def _key(record: Record) -> tuple | None:
    """None for what is never joined."""
    if record.kind == "engine":
        return record.kind, record.device
    if record.kind == "ablation" and record.command and record.device:
        return record.kind, record.device, work_of(record.command)
    return None


def _agree(one: Record, other: Record) -> bool:
    """Whether arms of the same name were given the same overrides."""
    ours, theirs = (record.data.get("arms", {}) for record in (one, other))
    return all(ours[arm] == theirs[arm] for arm in ours.keys() & theirs.keys())


def _facts(records: list[Record]) -> dict[str, str]:
    return {name: "; ".join(dict.fromkeys(getattr(record, name) for record in records if getattr(record, name)))
            for name in FACTS}


def _notes(records: list[Record]) -> tuple[str, ...]:
    return tuple(f"{record.name}: {note}" for record in records for note in record.notes)


def _joined(records: list[Record]) -> Record:
    first, name = records[0], " + ".join(record.name for record in records)
    seeds = tuple(dict.fromkeys(seed for record in records for seed in record.seeds))
    if first.kind == "engine":
        data = {**first.data, "runs": [one for record in records for one in record.data["runs"]]}
    else:  # a seed may stand in several files, with another model or another version of the overlay
        def merged(level: str) -> dict:
            found: dict[str, dict] = {}
            for number, record in enumerate(records, 1):
                for arm, by_seed in record.data.get(level, {}).items():
                    found.setdefault(arm, {}).update({f"{seed} of file {number}": one for seed, one in by_seed.items()})
            return found

        data = {**first.data, "measures": merged("measures"), "curves": merged("curves"),
                "arms": {arm: said for record in records for arm, said in record.data.get("arms", {}).items()},
                "failed": [text for record in records for text in record.data.get("failed", [])]}
    return replace(first, name=name, data=data, seeds=seeds, notes=_notes(records), **_facts(records))


def pooled(records: list[Record]) -> list[Record]:
    """The records in their order, comparable ones joined at the place of the first; superseded ones stay alone."""
    groups: list[list[Record]] = []
    for record in records:
        key = None if record.superseded else _key(record)
        mate = next((group for group in groups if key and not group[0].superseded and _key(group[0]) == key
                     and all(_agree(one, record) for one in group)), None)
        if mate:
            mate.append(record)
        else:
            groups.append([record])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]
