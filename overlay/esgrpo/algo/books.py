"""What became of every prompt and response of a run over its restarts, from its records. Pure; standard library only.

A start goes on from a checkpoint: what was trained after that checkpoint is rolled back, what was drawn after it is
drawn again, and what was drawn before it and had no end must come back (re-issued, or restored as it was). A *draw* is
the position of a prompt in the stream of the data loader, from 1, over all starts of a run. Row kinds and their fields
are those of `algo.rows`; rows without them (of older releases) leave what they would say unknown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("start", "checkpoint", "submitted", "reissued", "restored", "batch", "trained", "responses",
         "replaced", "failed", "evicted", "dropped")
OPEN, TRAINED, ROLLED_BACK, MISSING = "open", "trained", "rolled_back", "missing"
GIVEN_UP = ("replaced", "evicted")
FAILED = "failed"  # no last word under v1: a group with some responses may still be trained, or evicted
PRUNED, THROWN_AWAY = "pruned", "thrown_away"
SHOWN = 5  # draws that a line names

Rows = Mapping[str, Sequence[dict]]


def run_of(row: dict) -> str:
    return row.get("run", "")


def start_of(row: dict) -> int:
    return row.get("restart", 0)


def response_of(row: dict) -> tuple[str, int, str, int]:
    """(run, restart, group, member): what tells a response from all others; a group's id may come back in a restart."""
    return run_of(row), start_of(row), row["group"], row["member"]


def trained_in(row: dict) -> int:
    """The start that trained a row; a response may be of an earlier one."""
    told = row.get("trained_in")
    return start_of(row) if told is None else told


def of_runs(rows: Rows) -> dict[str, dict[str, list[dict]]]:
    """The rows of each run in one directory, runs in order of their first row."""
    found: dict[str, dict[str, list[dict]]] = {}
    for row in sorted((row for kind in KINDS for row in rows.get(kind, ())), key=lambda row: row["time"]):
        found.setdefault(run_of(row), {})
    for kind in KINDS:
        for row in rows.get(kind, ()):
            found[run_of(row)].setdefault(kind, []).append(row)
    return found


@dataclass(frozen=True)
class Link:
    """A start whose steps up to `last` the present weights hold; `drawn`: draws of the checkpoint it went on from."""

    restart: int
    last: float
    drawn: int


def lineage(starts: Iterable[dict], checkpoints: Iterable[dict]) -> list[Link] | None:
    """The starts of one run that its newest start goes back to, oldest first; None when no start is recorded."""
    by_number = {start_of(row): row for row in starts}
    saved = [(row["step"], start_of(row)) for row in checkpoints]
    chain: list[Link] = []
    number, last = max(by_number, default=None), math.inf
    while number is not None:
        start = by_number[number]
        chain.append(Link(number, last, start.get("drawn") or 0))
        last = start["resumed_step"]
        earlier = [other for other in by_number if other < number]
        savers = [other for step, other in saved if step == last and other in earlier]
        number = max(savers or earlier, default=None) if last else None
    return chain[::-1] or None


def is_kept(row: dict, chain: list[Link] | None) -> bool:
    """Is what this row says was trained part of the present weights?"""
    if chain is None:
        return True
    last = {link.restart: link.last for link in chain}.get(trained_in(row), -1)
    step = row.get("step")
    return (step is None or step <= last) and last >= 0


def rolled_back(trained: Iterable[dict], rows: Rows) -> set[tuple[str, int, str, int]]:
    """Responses of `trained` rows whose update a restart threw away, and that were not trained again as they are."""
    chains = {run: lineage(mine.get("start", ()), mine.get("checkpoint", ())) for run, mine in of_runs(rows).items()}
    kept: dict[bool, set] = {True: set(), False: set()}
    for row in trained:
        kept[is_kept(row, chains.get(run_of(row)))].add(response_of(row))
    return kept[False] - kept[True]


@dataclass
class Books:
    """One run. `prompts` and `responses` count fates; `problems` are what does not balance, empty when all does."""

    run: str
    prompts: Counter = field(default_factory=Counter)
    responses: Counter = field(default_factory=Counter)
    starts: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    dropped: int = 0

    @property
    def balanced(self) -> bool:
        return not self.problems


class _Account:
    """Walks the starts of a lineage, oldest first, and keeps the fate of every draw and of every group."""

    def __init__(self, rows: Rows):
        self.rows = {kind: _by_start(rows.get(kind, ())) for kind in KINDS}
        self.draws: dict[object, str] = {}
        self.groups: dict[tuple[int, str], str] = {}  # fate of (start that generated it, group)
        self.here: dict[str, tuple[object, int]] = {}  # groups that the present start knows: (draw, start of origin)
        self.unsubmitted: list[str] = []
        self.twice: list[object] = []
        self.missing: list[object] = []
        self.starts: list[dict] = []

    def start(self, link: Link, first: bool) -> None:
        before, self.here = self.here, {}
        void = [draw for draw in self.draws if isinstance(draw, int) and draw > link.drawn and not first]
        for draw in void:
            del self.draws[draw]
        in_flight = [draw for draw, fate in self.draws.items() if fate == OPEN]
        gives_back = [draw for row in self.rows["start"].get(link.restart, ()) for draw in row.get("gives_back", ())]
        back = self._came_back(link.restart, before, set(gives_back))
        missing = [draw for draw in in_flight if draw not in back]
        self.draws.update(dict.fromkeys(missing, MISSING))
        self.missing += missing
        self.starts.append({"restart": link.restart, "drawn_again": len(void), "in_flight": len(in_flight),
                            "came_back": len(back), "missing": len(missing)})
        for row in self.rows["submitted"].get(link.restart, ()):
            draw = row.get("draw")
            draw = row["group"] if draw is None else draw
            if draw in self.draws and draw not in back:
                self.twice.append(draw)
            self.here[row["group"]] = draw, link.restart
            self.draws[draw] = OPEN

    def _came_back(self, restart: int, before: dict, back: set) -> set:
        """Draws that were given back by this start; restored groups keep their responses, others start anew.

        `back`: those of them that the start itself says, which may be issued later.
        """
        for row in self.rows["reissued"].get(restart, ()):
            draw, group = row.get("draw"), row["group"]
            draw = before.get(row.get("was") or group, (group,))[0] if draw is None else draw
            self.here[group] = draw, restart
            back.add(draw)
        for group in (group for row in self.rows["restored"].get(restart, ()) for group in row["groups"]):
            self.here[group] = before.get(group, (group, restart))
            self.groups.pop((self.here[group][1], group), None)  # what it became after the checkpoint
            back.add(self.here[group][0])
        for draw in back:
            if self.draws.get(draw) == TRAINED:
                self.twice.append(draw)
            self.draws[draw] = OPEN
        return back

    def run(self, link: Link) -> None:
        self._give_up(FAILED, link.restart)
        for group, step in self._trained(link.restart):
            draw, origin = self._of(group, link.restart)
            if step > link.last:
                self.groups.setdefault((origin, group), ROLLED_BACK)
                continue
            self.groups[origin, group] = TRAINED
            self._end(draw, TRAINED)
        for kind in GIVEN_UP:
            self._give_up(kind, link.restart)

    def _give_up(self, kind: str, restart: int) -> None:
        for row in self.rows[kind].get(restart, ()):
            group = row["group"]
            draw, origin = self._of(group, restart)
            self.groups[origin, group] = kind
            self._end(draw, kind)

    def left(self, restarts: set[int]) -> None:
        """What other starts than these trained is rolled back: nothing goes on from them."""
        for restart in (self.rows["batch"].keys() | self.rows["trained"].keys()) - restarts if restarts else ():
            for group, _ in self._trained(restart):
                self.groups.setdefault((restart, group), ROLLED_BACK)

    def _trained(self, restart: int) -> list[tuple[str, float]]:
        """(group, step) of this start's batches; rows of releases that recorded no batches tell them, too."""
        found = [(group, row["step"]) for row in self.rows["batch"].get(restart, ()) for group in row["groups"]]
        known = {group for group, _ in found}
        late = {row["group"]: row.get("step") or 0 for rows in self.rows["trained"].values() for row in rows
                if trained_in(row) == restart and row["group"] not in known}
        return [*found, *late.items()]

    def _of(self, group: str, restart: int) -> tuple[object, int]:
        if group not in self.here:
            self.unsubmitted.append(group)
            self.here[group] = None, restart
        return self.here[group]

    def _end(self, draw, fate: str) -> None:
        if draw is None:
            return
        if self.draws.get(draw, OPEN) not in (OPEN, FAILED):
            self.twice.append(draw)
        self.draws[draw] = fate


def settle(rows: Rows, run: str = "") -> Books:
    """The books of one run, from its rows by kind."""
    books = Books(run, dropped=sum(row["rows"] for row in rows.get("dropped", ())))
    chain = lineage(rows.get("start", ()), rows.get("checkpoint", ()))
    account = _Account(rows)
    newest = max((start_of(row) for kind in KINDS for row in rows.get(kind, ())), default=0)
    for number, link in enumerate(chain or [Link(start, math.inf, 0) for start in range(newest + 1)]):
        account.start(link, first=number == 0)
        account.run(link)
    account.left({link.restart for link in chain or ()})
    books.starts = account.starts
    _responses(books, rows, account, chain[-1].restart if chain else newest, chain)
    if rows.get("submitted"):
        _prompts(books, rows, account, chain)
    if books.problems and books.dropped:
        books.problems.append(f"{books.dropped} rows could not be written")
    return books


def _prompts(books: Books, rows: Rows, account: _Account, chain: list[Link] | None) -> None:
    books.prompts = Counter(account.draws.values())
    numbers = [draw for draw in account.draws if isinstance(draw, int)]
    first = 1 + (chain[0].drawn if chain else 0)  # a run may begin with a checkpoint of another one
    last = max([*numbers, *(link.drawn for link in chain or ())], default=0)
    gaps = sorted(set(range(first, last + 1)) - set(numbers))
    books.prompts["drawn"] = len(account.draws)
    for found, what in ((account.missing, "in flight at a restart did not come back"),
                        (account.twice, "ended or were issued more than once"), (gaps, "have no record of their draw")):
        if found:
            books.problems.append(f"{_some(found, 'prompts')} {what}")
    if account.unsubmitted:
        books.problems.append(f"{_some(account.unsubmitted, 'groups')} were trained or given up without being drawn")
    size = max((row.get("prompts_per_epoch") or 0 for row in rows.get("start", ())), default=0)
    per_epoch: dict[int, Counter] = {}
    for draw, fate in account.draws.items():
        if size and isinstance(draw, int):
            per_epoch.setdefault((draw - 1) // size, Counter())[fate] += 1
    books.epochs = [{"epoch": epoch, "prompts": size, **found} for epoch, found in sorted(per_epoch.items())]


def _some(found: list, what: str) -> str:
    named = ", ".join(map(str, found[:SHOWN])) + (", ..." if len(found) > SHOWN else "")
    return f"{len(found)} {what} ({named})"


def _responses(books: Books, rows: Rows, account: _Account, newest: int, chain: list[Link] | None) -> None:
    trained = [row for row in rows.get("trained", ()) if is_kept(row, chain)]
    times = Counter(map(response_of, trained))
    pruned = {response_of(row) for row in trained if row.get("pruned")}
    seen = Counter(map(response_of, rows.get("responses", ())))
    for response in seen:
        _, restart, group, _ = response
        here = account.here.get(group, (None, newest))[1] == restart
        fate = account.groups.get((restart, group)) or (OPEN if here else THROWN_AWAY)
        if fate == TRAINED and response in pruned:
            fate = PRUNED
        books.responses[fate] += 1
    books.responses["generated"] = len(seen)
    for what, found in (("were trained more than once", [key for key, count in times.items() if count > 1]),
                        ("ended more than once", [key for key, count in seen.items() if count > 1]),
                        ("were trained without a record of their end", list(times.keys() - seen.keys()))):
        if found:
            names = [f"{group}/{member} of start {restart}" for _, restart, group, member in sorted(found)]
            books.problems.append(f"{_some(names, 'responses')} {what}")


def _by_start(rows: Sequence[dict]) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for row in rows:
        found.setdefault(start_of(row), []).append(row)
    return found
