"""What early verdicts save, and what they cost: the product's rule, replayed on recorded groups. Standard library only.

    python -m bench.verdict [--json] [--seed 0] [--shuffled] [--segments | --cost] [--results FILE [--seeds 0,1]
                            [--orders N]]

Recorded groups (bench.testbed.record_groups; every bench/results/groups_*.json.gz is a task) are decoded again
(`bench.common.verdict_replay`).
Looks, coins, cuts, gates and weight syncs are those of `esgrpo.algo.verdict`; the rule for loops, which is on in every
arm, is that of `esgrpo.algo.loops` with its defaults. A response that is cut is not seen to its end by anybody but
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
at longer ones that are simulated by stretching every token. `--orders N`: a record has its groups in one order; each of
N random ones is played.

Exit code: 1 where something that is wanted is missed, which the last lines say: on `search` 0.20 of the later half's
tokens with at most 0.06 of the cuts false; everywhere no less than the rule for loops saves, false cuts below twice the
bar in every window, correct responses lost within the gate's own bounds; with `--shuffled` a gate that stays shut.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
try:
    import esgrpo  # noqa: F401
except ImportError:  # not installed: this command needs the repository and Python only
    sys.path.insert(0, str(ROOT / "overlay"))

from bench.common import console  # noqa: E402
from bench.common.provenance import add_results, commit, seeds_of, write_record  # noqa: E402
from bench.common.verdict_replay import LOOKS_IN_CAP, NO_BOUNDARY, Replay, Response, fixed, load  # noqa: E402
from esgrpo.algo.calibration import ranks  # noqa: E402
from esgrpo.algo.looks import Looks  # noqa: E402
from esgrpo.algo.verdict_features import FEATURES, LENGTH_FEATURES, SIBLING_FEATURES  # noqa: E402
from esgrpo.algo.verdict_gate import Settings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
ARMS: dict[str, Sequence[int] | None] = {"learned": range(len(FEATURES)), "loop_rule": None, "length": LENGTH_FEATURES,
                                         "siblings": SIBLING_FEATURES}
CAPS = (512, 2048, 8192)  # of --segments
MOST = 0.8  # of a group, of --segments
STRETCHED_GROUPS, HALVINGS = 300, 6  # of --segments: enough to open the gate, and to meet the number of looks
LOOK_GROUPS = 100  # whose looks are timed
COST_NOTE = ("CPU time of the rule alone: what brings a look from an engine to the worker is not in it. An ending "
             "learns from every look of its response, so that it takes longer where there are more of them.")
WANTED_SAVED, ALLOWED_FALSE = 0.20, 0.06  # on `search`


def auc(scored: Sequence[tuple[float, bool]]) -> float:
    """Probability that a right one has a higher score than a wrong one; 0.5 where there are not both."""
    right = sum(label for _, label in scored)
    pairs = right * (len(scored) - right)
    if not pairs:
        return 0.5
    places = ranks([score for score, _ in scored])
    above = sum(place for place, (_, label) in zip(places, scored, strict=True) if label)
    return (above - right * (right + 1) / 2) / pairs


def skill(groups: list[list[Response]], columns: Sequence[int], seed: int, cap: int) -> dict[str, float]:
    """AUC while nothing is cut, of a rule that never has seen enough: of all (""), and of each family."""
    watching = Settings(min_outcomes=NO_BOUNDARY)
    Replay(groups, columns, seed, fixed(cap), watching).run()
    later = [row for group in groups[len(groups) // 2:] for row in group]
    families = dict.fromkeys(["", *(row.family for row in later)])
    return {family: auc([(probability, row.correct) for row in later if family in ("", row.family)
                         for probability in row.probabilities]) for family in families}


def reordered(groups: list[list[Response]], order: int) -> list[list[Response]]:
    """A record has its groups in one order; this is another."""
    random.Random(order).shuffle(groups)
    for number, group in enumerate(groups):
        for row in group:
            row.group = number
    return groups


def task_result(path: Path, seed: int, shuffled: bool = False, settings: Settings | None = None,
                order: int | None = None) -> dict:
    """Arm -> what it saves and costs on one record. `order`: of its groups, at random; None: as recorded."""
    cap, groups = load(path)
    groups = groups if order is None else reordered(groups, order)
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


def worker_cost(path: Path, seed: int) -> dict:
    """CPU microseconds in the rule of an agent-loop worker while a record is played: of a look, an ending, an update.
    See COST_NOTE."""
    cap, groups = load(path)
    replay = Replay(groups, ARMS["learned"], seed, fixed(cap), Settings())
    spent, counts, rule = Counter(), Counter(), replay.rule

    def timed(name: str, method: Callable, count: Callable[..., int]) -> Callable:
        def call(*args):
            began = time.thread_time_ns()
            result = method(*args)
            spent[name] += time.thread_time_ns() - began
            counts[name] += count(*args)
            return result
        return call

    rule.looks = timed("look", rule.looks, lambda group, seen: sum(map(len, seen.values())))
    rule.ended = timed("ending", rule.ended, lambda *_: 1)
    rule.update = timed("update", rule.update, lambda *_: 1)
    replay.run()
    responses = sum(map(len, groups))
    return {**{name: spent[name] / counts[name] / 1e3 for name in counts},
            "response": (spent["look"] + spent["ending"]) / responses / 1e3,
            "looks_per_response": counts["look"] / responses}


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


def opened(tasks: dict) -> list[str]:
    return [f"{name}: the gate opened on shuffled outcomes" for name, arms in tasks.items() if arms["learned"]["open"]]


def print_table(tasks: dict) -> None:
    print(f"{'':23}{'tokens':>8}{'false':>8}{'correct':>9}{'auc':>7}{'makespan':>10}  later half: tokens, false")
    for task, arms in tasks.items():
        for arm, row in arms.items():
            score = "-" if row["auc"] is None else f"{row['auc']:.2f}"
            print(f"{task:12}{arm:11}{row['tokens_saved']:8.3f}{row['false_rate']:8.3f}{row['correct_lost']:9.3f}"
                  f"{score:>7}{row['makespan_saved']:10.3f}{row['later']['tokens_saved']:14.3f}"
                  f"{row['later']['false_rate']:8.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.verdict", __doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("--seed", type=int, default=0, help="of the coins, and of --shuffled")
    parser.add_argument("--task", action="append", help="one record, by name; may be given several times")
    parser.add_argument("--shuffled", action="store_true", help="shuffle the outcomes")
    parser.add_argument("--segments", action="store_true", help="compare distances of looks instead; takes minutes")
    parser.add_argument("--cost", action="store_true", help="time what a worker takes for a look and an ending instead")
    add_results(parser, several=True)
    parser.add_argument("--orders", type=console.whole, default=0, metavar="N",
                        help="of --results: random orders of the groups")
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
    seeds = seeds_of(parser, options)
    if options.orders and not options.results:
        parser.error("--orders goes with --results")
    if options.cost:
        load_before = os.getloadavg()[0]
        cost = {name: {str(seed): worker_cost(path, seed) for seed in seeds} for name, path in chosen.items()}
        if options.results:
            write_record(options.results, "bench.verdict", argv, seeds, {
                "notes": [COST_NOTE], "worker_cost": cost, "load_average_before": load_before,
                "load_average_after": os.getloadavg()[0]})
        print(json.dumps({**facts, "worker_cost": {name: next(iter(found.values())) for name, found in cost.items()}}))
        return 0
    if options.segments:
        caps = {name: {str(seed): segments(path, seed) for seed in seeds} for name, path in chosen.items()}
        if options.results:
            write_record(options.results, "bench.verdict", argv, seeds, {"caps": caps})
        print(json.dumps({**facts, "caps": {name: next(iter(found.values())) for name, found in caps.items()}}))
        return 0
    began = time.time()
    played = {f"seed {seed}" + ("" if order is None else f", order {order}"): {
        name: task_result(path, seed, options.shuffled, order=order) for name, path in chosen.items()}
        for seed in seeds for order in (range(options.orders) if options.orders else (None,))}
    missed = {name: opened(tasks) if options.shuffled else acceptance(tasks) for name, tasks in played.items()}
    tasks = next(iter(played.values()))  # that are shown; the others are in the record
    cost = look_cost(next(iter(chosen.values()))) if options.json or options.results else None
    if options.results:
        write_record(options.results, "bench.verdict", argv, seeds, {
            "shuffled": options.shuffled, "look_microseconds": cost, "missed": missed,
            "tasks": {task: {name: found[task] for name, found in played.items()} for task in chosen}})
    if options.json:
        print(json.dumps({**facts, "tasks": tasks, "look_microseconds": cost, "missed": next(iter(missed.values())),
                          "seconds": round(time.time() - began, 1)}))
    else:
        print_table(tasks)
    for name, lines in missed.items():
        for line in lines:
            print(f"bench.verdict: missed: {f'{name}: ' if len(missed) > 1 else ''}{line}", file=sys.stderr)
    return 1 if any(missed.values()) else 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
