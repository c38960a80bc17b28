"""`esgrpo status RUN_DIR`: what each module of a run decided, from its records. Needs neither torch nor verl."""

from __future__ import annotations

import json
from collections.abc import Sequence

from esgrpo import config, records, refusals
from esgrpo.algo import decisions
from esgrpo.algo.rows import Decisions
from esgrpo.errors import ConfigError


def of_directory(run_dir: str, reports: list[dict] = ()) -> list[decisions.Row]:
    """One row a module of the newest run in a directory, over all of its starts."""
    return of_rows(records.read(run_dir, "decisions"), reports)


def of_rows(rows: Sequence[Decisions], reports: list[dict] = ()) -> list[decisions.Row]:
    """The same from rows in order of time, of which the newest of each process is enough.

    A run of an older release has no such records: what was on is read from `reports`, the states of its hooks. Empty
    where its settings are not known, or not those of this release but for sections that are gone.
    """
    begun = [row for row in rows if row.settings is not None]
    given = begun[-1].settings if begun else next((json.loads(report["segment"]) for report in reports
                                                      if report.get("segment")), None)
    if given is None:
        return []
    try:
        settings = config.parse({key: value for key, value in given.items()
                                 if f"{config.PREFIX}.{key}" not in refusals.REMOVED})
    except ConfigError:
        return []
    facts = (begun[-1].facts or {}) if begun else {}
    mine = [row for row in rows if begun and row.run == begun[-1].run]
    counts, audit = decisions.of_rows(mine)
    return decisions.table(decisions.Run(settings, counts, audit, facts.get("trainer", ""), facts.get("replicas", 1),
                                         facts.get("response_length", 0), facts.get("overlap_fixed", ())),
                           recorded=bool(begun))


def cells(rows: list[decisions.Row]) -> list[list[str]]:
    """As a table, without its header: module, on or off, decisions, reason or the switch of what is off."""
    return [[row.module, "on" if row.on else "off", "" if row.decided is None or not (row.on or row.decided)
             else str(row.decided), row.reason if row.on else f"({row.switch})"] for row in rows]
