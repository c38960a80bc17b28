"""Recorded groups, decoded again under the product's own looks, coins, gate and loop rule. Standard library only.

One token of every running response a tick, as many responses at once as SLOTS, in the order in which they were
sampled. What is counted, and in which words, is said in `bench.verdict`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.common.recorded_groups import NATS, read
from esgrpo.algo.looks import Looks
from esgrpo.algo.segments import PRUNE, SegmentBook
from esgrpo.algo.terms import Rule
from esgrpo.algo.verdict import CUT, Verdicts
from esgrpo.algo.verdict_features import Glance
from esgrpo.algo.verdict_gate import Settings
from esgrpo.config import Prune, Repetition, Segment

SLOTS = 256  # responses that decode at once
SYNC_GROUPS = 16  # groups between two weight syncs
LOOKS_IN_CAP = 16  # at a fixed distance: 32 tokens at a cap of 512
NO_BOUNDARY = 1 << 40  # segment length that no response reaches
DECILES, FALSE_WINDOW = 10, 50  # verdicts in a row of which false ones are counted
LATER = ("tokens_saved", "false_rate", "correct_lost", "makespan_saved")


def fixed(cap: int) -> Callable[[int, float], int]:
    """The distance of looks of a run."""
    return lambda done, finished: cap // LOOKS_IN_CAP


@dataclass
class Response:
    """A recorded response with what the replay makes of it."""

    group: int
    member: int
    tokens: list[int]
    sums: list[float]  # of log-probs up to each token
    correct: bool
    loop: int | None  # tokens at which the rule for loops ends it
    family: str = ""  # of its prompt, where a record has several
    end: int = 0  # tokens that were decoded
    cut: str = ""  # rule
    began: int = 0  # tick
    looked: int = 0  # tokens at the last look
    probabilities: list[float] = field(default_factory=list)


def loop_end(tokens: list[int], sums: list[float]) -> int | None:
    rule = Repetition(enable=True)
    book = SegmentBook(Segment(enable=True, segment_length=NO_BOUNDARY, prune=Prune(repetition=rule)))
    book.add(0, "g", 0, 0)
    for at in range(rule.check_interval, len(tokens), rule.check_interval):
        if book.look(0, tokens[:at], (sums[at - 1], at)).outcome == PRUNE:
            return at
    return None


def load(path: Path, stretch: int = 1, most: int | None = None) -> tuple[int, list[list[Response]]]:
    """(cap, groups), the first `most` of them. `stretch`: a token becomes so many, as surprising each."""
    record = read(path)
    groups = []
    for number, group in enumerate(record["groups"][:most]):
        rows = []
        for member, row in enumerate(group["responses"]):
            tokens = [token * stretch + part for token in row["tokens"] for part in range(stretch)]
            sums = list(itertools.accumulate(-units * NATS for units in row["surprisal"] for _ in range(stretch)))
            rows.append(Response(number, member, tokens, sums, row["correct"], loop_end(tokens, sums),
                                 group.get("family", "")))
        groups.append(rows)
    return record["cap"] * stretch, groups


class Replay:
    """One arm over the groups of one record. `distance(done, finished share)`: tokens to the next look."""

    def __init__(self, groups: list[list[Response]], columns: Sequence[int] | None, seed: int,
                 distance: Callable[[int, float], int], settings: Settings, shuffled: bool = False):
        self.groups, self.distance, self.settings = groups, distance, settings
        rows = [row for group in groups for row in group]
        labels = [row.correct for row in rows]
        if shuffled:
            random.Random(seed).shuffle(labels)
        self.label = {(row.group, row.member): label for row, label in zip(rows, labels, strict=True)}
        self.rule = None if columns is None else Verdicts(settings, random.Random(seed), columns)
        self.engine = Looks()
        self.left = [len(group) for group in groups]
        self.looks = self.closed = self.open_syncs = 0
        self.events: list[tuple[int, int, int, int, str]] = []  # tick, order, group, member, what
        self.order = itertools.count()
        self.waiting = iter(rows)
        self.cuts: list[tuple[str, bool]] = []  # rule, false; in order
        for row in rows:
            row.end, row.cut, row.looked, row.probabilities = 0, "", 0, []

    def run(self) -> Replay:
        for _ in range(SLOTS):
            self._begin(0)
        while self.events:
            tick, looks = self.events[0][0], {}
            while self.events and self.events[0][0] == tick:
                _, _, group, member, what = heapq.heappop(self.events)
                row = self.groups[group][member]
                if what == "look":  # after all endings of this tick, and of a group all at once
                    looks.setdefault(group, []).append(row)
                else:
                    self._ended(row, tick, what)
            for group, rows in looks.items():
                self._look(group, rows, tick)
        return self

    def _begin(self, tick: int) -> None:
        row = next(self.waiting, None)
        if row is None:
            return
        row.began = tick
        if self.rule is not None:
            self.rule.watch(str(row.group), len(self.groups[row.group]))
        self._plan(row)

    def _plan(self, row: Response) -> None:
        """Its next event: a look, a proven loop or its end."""
        at, what = (len(row.tokens), "end") if row.loop is None else (row.loop, "loop")
        if self.rule is not None:
            group = self.groups[row.group]
            look = row.looked + max(1, self.distance(row.looked, sum(other.end > 0 for other in group) / len(group)))
            if look < at:
                at, what = look, "look"
        heapq.heappush(self.events, (row.began + at, next(self.order), row.group, row.member, what))

    def _ended(self, row: Response, tick: int, what: str) -> None:
        row.end = tick - row.began
        if what == "loop":
            self._cut(row, Rule.REPETITION)
            if self.rule is not None:
                self.rule.removed(str(row.group), row.member, cut=True)
        elif self.rule is not None:
            self.rule.ended(str(row.group), row.member, row.end, self.label[row.group, row.member])
        self._leave(row, tick)

    def _cut(self, row: Response, rule: str) -> None:
        row.cut = rule
        self.cuts.append((rule, self.label[row.group, row.member]))

    def _leave(self, row: Response, tick: int) -> None:
        self.left[row.group] -= 1
        self.engine.ended((row.group, row.member), str(row.group), not self.left[row.group])
        if not self.left[row.group] and self.rule is not None:
            self.rule.close(str(row.group))
            self.closed += 1
            if self.closed % SYNC_GROUPS == 0:
                self.rule.update(self.rule.take())
                self.open_syncs += self.rule.open
        self._begin(tick)

    def _look(self, group: int, rows: list[Response], tick: int) -> None:
        name = str(group)
        for row in rows:
            at = row.looked = tick - row.began
            self.engine.look((group, row.member), name, row.member, at, row.tokens[:at], (row.sums[at - 1], at))
        self.looks += len(rows)
        seen = self.engine.take([name])[name]
        decided = self.rule.looks(name, {member: [Glance(*glance) for glance in glances]
                                         for member, glances in seen.items()})
        for row in rows:
            latest = self.rule.groups[name].members[row.member].rows[-1]
            row.probabilities.append(self.rule.model.probability(latest))
            if row.member in decided and decided[row.member].what == CUT:
                row.end = tick - row.began
                self._cut(row, Rule.VERDICT)
                self._leave(row, tick)
            else:
                self._plan(row)

    def result(self) -> dict:
        """Of all groups; `later`: of the later half, after the warm-up."""
        later = self._counts(self.groups[len(self.groups) // 2:])
        return {**self._counts(self.groups), "later": {name: later[name] for name in LATER},
                "worst_window": self._worst_window(), "looks_per_response": self.looks / sum(map(len, self.groups)),
                "open": self.open_syncs / max(1, self.closed // SYNC_GROUPS)}

    def _worst_window(self) -> float:
        """Largest share of false cuts among FALSE_WINDOW verdicts in a row, or among all where there are fewer."""
        falses = [false for rule, false in self.cuts if rule == Rule.VERDICT]
        size = max(1, min(FALSE_WINDOW, len(falses)))
        return max((sum(falses[at:at + size]) / size for at in range(len(falses) - size + 1)), default=0.0)

    def _counts(self, groups: list[list[Response]]) -> dict:
        rows = [row for group in groups for row in group]
        whole = sum(len(row.tokens) for row in rows)
        lost = [bool(row.cut) for row in sorted(rows, key=lambda row: len(row.tokens))
                if self.label[row.group, row.member]]
        right = [row for row in rows if self.label[row.group, row.member]]
        falses = [(row.cut, self.label[row.group, row.member]) for row in rows if row.cut]
        longest = sum(max(len(row.tokens) for row in group) for group in groups)
        return {
            "tokens_saved": 1 - sum(row.end for row in rows) / whole,
            "false_rate": share([false for _, false in falses]),
            "correct_lost": sum(lost) / len(lost) if lost else 0.0,
            "correct_lost_by_length": [share(lost[len(lost) * i // DECILES:len(lost) * (i + 1) // DECILES])
                                       for i in range(DECILES)],
            "shortened": 1 - mean_tokens([row for row in right if not row.cut]) / mean_tokens(right) if right else 0.0,
            "makespan_saved": 1 - sum(max(row.end for row in group) for group in groups) / longest,
            "cuts": len(falses), "cut_by_verdict": sum(rule == Rule.VERDICT for rule, _ in falses),
            "false_by_verdict": sum(false for rule, false in falses if rule == Rule.VERDICT),
        }


def mean_tokens(rows: Sequence[Response]) -> float:
    return sum(len(row.tokens) for row in rows) / max(1, len(rows))


def share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
