"""What early verdicts save, and what they cost: the product's rule, replayed on recorded groups. Standard library only.

    python -m bench.verdict [--json] [--seed 0] [--shuffled] [--segments]

Recorded groups (bench.testbed.record_groups; every bench/results/groups_*.json.gz is a task) are decoded again, one
token of every running response a tick, as many responses at once as `SLOTS`, in the order in which they were sampled.
Looks, coins, cuts, gates and weight syncs are those of `esgrpo.algo.verdict`; the rule for loops, which is on in every
arm, is that of `esgrpo.algo.segments` with its defaults. A response that is cut is not seen to its end by anybody but
the bench, which counts:

    tokens_saved    share of all recorded tokens that were not decoded, from the first one on: warm-up included
    false_rate      share of the cuts whose response would have ended correct
    correct_lost    share of the correct responses that were cut; correct_lost_by_length: in each tenth of lengths
    shortened       share by which cuts shorten the mean correct response
    auc             of the probabilities at all looks in the later half of the groups, while nothing is cut; none
                    without a score, or with shuffled outcomes
    makespan_saved  share of the sum over groups of the longest member's tokens

Arms: `learned` is the rule, `loop_rule` no verdicts, `length` and `siblings` the same rule whose model sees nothing
but the length, or the finished siblings. `--shuffled`: outcomes are shuffled over all responses; the gate must stay
shut. `--segments`: elastic distances of looks against a fixed one at equal numbers of looks, at the recorded cap and
at longer ones that are simulated by stretching every token.

Exit code: 1 where something that is wanted is missed, which the last lines say: on `search` 0.20 of the later half's
tokens with at most 0.06 of the cuts false; everywhere no less than the rule for loops saves, false cuts below twice the
bar in every window, correct responses lost within the gate's own bounds; with `--shuffled` a gate that stays shut.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
try:
    import esgrpo  # noqa: F401
except ImportError:  # not installed: this command needs the repository and Python only
    sys.path.insert(0, str(ROOT / "overlay"))

from bench.common.provenance import commit  # noqa: E402
from bench.common.recorded_groups import NATS, read  # noqa: E402
from esgrpo.algo.calibration import ranks  # noqa: E402
from esgrpo.algo.looks import Looks  # noqa: E402
from esgrpo.algo.segments import PRUNE, SegmentBook  # noqa: E402
from esgrpo.algo.terms import Rule  # noqa: E402
from esgrpo.algo.verdict import CUT, Verdicts  # noqa: E402
from esgrpo.algo.verdict_features import FEATURES, LENGTH_FEATURES, SIBLING_FEATURES, Glance  # noqa: E402
from esgrpo.algo.verdict_gate import Settings  # noqa: E402
from esgrpo.config import Prune, Repetition, Segment  # noqa: E402

RESULTS = ROOT / "bench" / "results"
SLOTS = 256  # responses that decode at once
SYNC_GROUPS = 16  # groups between two weight syncs
LOOKS_IN_CAP = 16  # at a fixed distance: 32 tokens at a cap of 512
NO_BOUNDARY = 1 << 40  # segment length that no response reaches
DECILES, FALSE_WINDOW = 10, 50  # verdicts in a row of which false ones are counted
LATER = ("tokens_saved", "false_rate", "correct_lost", "makespan_saved")
ARMS: dict[str, Sequence[int] | None] = {"learned": range(len(FEATURES)), "loop_rule": None, "length": LENGTH_FEATURES,
                                         "siblings": SIBLING_FEATURES}
CAPS = (512, 2048, 8192)  # of --segments
MOST = 0.8  # of a group, of --segments
STRETCHED_GROUPS, HALVINGS = 300, 6  # of --segments: enough to open the gate, and to meet the number of looks
LOOK_GROUPS = 100  # whose looks are timed
WANTED_SAVED, ALLOWED_FALSE = 0.20, 0.06  # on `search`


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


def auc(scored: Sequence[tuple[float, bool]]) -> float:
    """Probability that a right one has a higher score than a wrong one; 0.5 where there are not both."""
    right = sum(label for _, label in scored)
    pairs = right * (len(scored) - right)
    if not pairs:
        return 0.5
    places = ranks([score for score, _ in scored])
    above = sum(place for place, (_, label) in zip(places, scored, strict=True) if label)
    return (above - right * (right + 1) / 2) / pairs


def fixed(cap: int) -> Callable[[int, float], int]:
    return lambda done, finished: cap // LOOKS_IN_CAP


def skill(groups: list[list[Response]], columns: Sequence[int], seed: int, cap: int) -> dict[str, float]:
    """AUC while nothing is cut, of a rule that never has seen enough: of all (""), and of each family."""
    watching = Settings(min_outcomes=NO_BOUNDARY)
    Replay(groups, columns, seed, fixed(cap), watching).run()
    later = [row for group in groups[len(groups) // 2:] for row in group]
    families = dict.fromkeys(["", *(row.family for row in later)])
    return {family: auc([(probability, row.correct) for row in later if family in ("", row.family)
                         for probability in row.probabilities]) for family in families}


def task_result(path: Path, seed: int, shuffled: bool = False, settings: Settings | None = None) -> dict:
    """Arm -> what it saves and costs on one record."""
    cap, groups = load(path)
    found = {}
    for arm, columns in ARMS.items():
        replay = Replay(groups, columns, seed, fixed(cap), settings or Settings(), shuffled)
        found[arm] = replay.run().result()
        families = {} if columns is None or shuffled else skill(groups, columns, seed, cap)
        found[arm]["auc"] = families.pop("", None)
        if families:
            found[arm]["auc_of_family"] = families
    return found


def look_cost(path: Path, repeats: int = 5) -> float:
    """Microseconds of a look in an engine (`Looks.look`): the median, in the best of so many passes."""
    cap, groups = load(path)
    distance = cap // LOOKS_IN_CAP
    best = float("inf")
    for _ in range(repeats):
        taken = []
        looks = Looks()
        for number, group in enumerate(groups[:LOOK_GROUPS]):
            name = str(number)
            for at in range(distance, cap, distance):
                for row in group:
                    if at < len(row.tokens):
                        tokens, sums, key = row.tokens[:at], (row.sums[at - 1], at), (number, row.member)
                        began = time.perf_counter()
                        looks.look(key, name, row.member, at, tokens, sums)
                        taken.append(time.perf_counter() - began)
        best = min(best, median(taken))
    return best * 1e6


def elastic(shortest: int, cap: int) -> Callable[[int, float], int]:
    """Young's checkpoint interval (1974): the more of a group has ended and the less is to come, the sooner a look.

    A response is predicted to double. Where nobody has ended there is nothing to decide.
    """
    longest = max(shortest, cap // 2)

    def distance(done: int, finished: float) -> int:
        if not 0 < finished < MOST:
            return shortest if finished else longest
        left = min(max(done, shortest), cap - done)
        return round(min(max((shortest * left / finished) ** 0.5, shortest), longest))

    return distance


def hazard(shortest: int, cap: int) -> Callable[[int, float], int]:
    """A constant share of what is decoded: the rarer, the longer it runs. A look never lies beyond half the cap."""
    return lambda done, finished: min(max(shortest, done // 2), cap // 2)


def late(shortest: int, cap: int) -> Callable[[int, float], int]:
    """Twice as far until most of the group has ended, then half as far."""
    return lambda done, finished: shortest // 2 if finished >= MOST else 2 * shortest


SCHEDULES = {"elastic": elastic, "hazard": hazard, "late": late}


def segments(path: Path, seed: int, caps: Sequence[int] = CAPS) -> dict:
    """Cap -> schedule -> looks per response and what is saved, at about as many looks as the fixed distance takes."""
    found = {}
    for stretch in (cap // CAPS[0] for cap in caps):
        cap, groups = load(path, stretch, STRETCHED_GROUPS)

        def played(distance, groups=groups):
            result = Replay(groups, ARMS["learned"], seed, distance, Settings()).run().result()
            return {"looks_per_response": result["looks_per_response"], **result["later"]}

        rows = {"fixed": played(fixed(cap))}
        for name, schedule in SCHEDULES.items():
            low, high, tried, wanted = 1, cap // 2, [], rows["fixed"]["looks_per_response"]
            for _ in range(HALVINGS):  # looks fall as the shortest distance rises
                middle = max(1, round((low * high) ** 0.5))
                tried.append({"shortest": middle, **played(schedule(middle, cap))})
                more = tried[-1]["looks_per_response"] > wanted
                low, high = (middle, high) if more else (low, middle)
            rows[name] = min(tried, key=lambda row: abs(row["looks_per_response"] - wanted))
        found[str(cap)] = rows
    return found


def acceptance(tasks: dict) -> list[str]:
    """What is wanted and not met."""
    missed = []
    for task, arms in tasks.items():
        learned, loops = arms["learned"], arms["loop_rule"]
        if learned["tokens_saved"] < loops["tokens_saved"]:
            missed.append(f"{task}: {learned['tokens_saved']:.3f} saved, by loops alone {loops['tokens_saved']:.3f}")
        if learned["worst_window"] > 2 * Settings().max_false_rate:
            missed.append(f"{task}: {learned['worst_window']:.2f} of a window's verdicts were false")
        longest = max(learned["correct_lost_by_length"])
        if learned["correct_lost"] > Settings().max_correct_lost or longest > Settings().max_lost_of_length:
            missed.append(f"{task}: {learned['correct_lost']:.3f} of the correct responses were cut, {longest:.3f} of "
                          "a tenth of their lengths")
    later = tasks.get("search", {}).get("learned", {}).get("later")
    if later and (later["tokens_saved"] < WANTED_SAVED or later["false_rate"] > ALLOWED_FALSE):
        missed.append(f"search, later half: {later['tokens_saved']:.3f} saved, {later['false_rate']:.3f} false; wanted "
                      f"{WANTED_SAVED}, {ALLOWED_FALSE}")
    return missed


def print_table(tasks: dict) -> None:
    print(f"{'':23}{'tokens':>8}{'false':>8}{'correct':>9}{'auc':>7}{'makespan':>10}  later half: tokens, false")
    for task, arms in tasks.items():
        for arm, row in arms.items():
            score = "-" if row["auc"] is None else f"{row['auc']:.2f}"
            print(f"{task:12}{arm:11}{row['tokens_saved']:8.3f}{row['false_rate']:8.3f}{row['correct_lost']:9.3f}"
                  f"{score:>7}{row['makespan_saved']:10.3f}{row['later']['tokens_saved']:14.3f}"
                  f"{row['later']['false_rate']:8.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("--seed", type=int, default=0, help="of the coins, and of --shuffled")
    parser.add_argument("--task", action="append", help="one record, by name; may be given several times")
    parser.add_argument("--shuffled", action="store_true", help="shuffle the outcomes")
    parser.add_argument("--segments", action="store_true", help="compare distances of looks instead; takes minutes")
    options = parser.parse_args(argv)
    paths = {path.name.removeprefix("groups_").removesuffix(".json.gz"): path
             for path in sorted(RESULTS.glob("groups_*.json.gz"))}
    wrong = [name for name in options.task or () if name not in paths]
    if wrong or not paths:
        print(f"bench.verdict | {', '.join(wrong) or 'no record'} | one of {', '.join(paths) or 'groups_*.json.gz'} in "
              "bench/results | nothing can be played | python -m bench.testbed.record_groups", file=sys.stderr)
        return 1
    chosen = {name: path for name, path in paths.items() if not options.task or name in options.task}
    command = ["python", "-m", "bench.verdict", *(sys.argv[1:] if argv is None else argv)]
    facts = {"command": shlex.join(command), "commit": commit(), "seed": options.seed}
    if options.segments:
        print(json.dumps({**facts, "caps": {name: segments(path, options.seed) for name, path in chosen.items()}}))
        return 0
    began = time.time()
    tasks = {name: task_result(path, options.seed, options.shuffled) for name, path in chosen.items()}
    if options.shuffled:
        missed = [f"{name}: the gate opened on shuffled outcomes" for name, arms in tasks.items()
                  if arms["learned"]["open"]]
    else:
        missed = acceptance(tasks)
    if options.json:
        print(json.dumps({**facts, "tasks": tasks, "look_microseconds": look_cost(next(iter(chosen.values()))),
                          "missed": missed, "seconds": round(time.time() - began, 1)}))
    else:
        print_table(tasks)
    for line in missed:
        print(f"bench.verdict: missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
