"""Reads the records of finished arms and computes the numbers of a comparison. Standard library only."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esgrpo.algo import books, decisions
from esgrpo.algo.accounting import bubble, quantile, tail_ratio, token_balance
from esgrpo.algo.pruning import is_correct
from esgrpo.algo.terms import Outcome, Rule
from esgrpo.records import read
from esgrpo.tools import decided
from esgrpo.tools.report import runs
from esgrpo.tools.report.runs import HOLD, time_to_target

# Held-out reward that all arms of a comparison race to, by scale and task of the testbed: a tenth above the start
# model's, which was 0.50 (small, search), 0.52 (small, chain) and 0.42 (large) in the mean of 82, 21 and 18 first
# evaluations of 128 prompts each. One of these alone is off by 0.05, so no arm may set its own.
TARGETS = {("small", "search"): 0.6, ("small", "chain"): 0.62, ("large", "search"): 0.52}

# Of every family of bench.pretrained the same: all arms race to each of them, and which of them a run passes is seen.
PRETRAINED_TARGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PRETRAINED = "smollm2"  # the scale; its one target for a figure is FIRST_SHOWN
FIRST_SHOWN = 0.5

CORRECT_FROM = 0.5  # a score: what success_threshold is without a word
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size="  # groups of an optimiser step
SAMPLERS = {"prompt-sampler", "v1-prompt-sampler"}  # hooks that choose prompts


@dataclass
class Result:
    """One arm within its budget. Rates are per second of budget; tokens are response tokens."""

    name: str
    seconds: float
    evaluations: list[tuple[float, float]]  # (seconds since ready, held-out reward)
    target: float
    time_to_target: float | None
    samples_to_target: int | None  # responses that had ended by then
    steps: int  # of verl
    updates: int  # optimiser steps
    responses: int
    bubble: dict[str, float]
    balance: dict[str, int]
    gradient_groups: int  # trained groups that have a gradient
    decoded: int
    effective_per_s: float  # and device
    effective_later: float  # in the later half of the budget, of all devices
    batches_later: Batches
    tail_ratio: float
    lengths: list[int]
    curves: dict  # of esgrpo.tools.report.runs
    states: dict[str, int]
    pruned: int
    partial: int
    sampled_by: list[int]  # responses that had ended by each evaluation
    sampler: bool  # prompts were chosen by the gradient that they promise
    modules: list[decisions.Row]  # what each decided in the whole run, or why nothing
    peak_bytes: int  # memory of all processes; 0 where it was not recorded
    visits: Visits
    first_rewards: dict[str, float]  # of prompts, by their first groups
    right: Right


@dataclass(frozen=True)
class Batches:
    """Of what the trainer took in the later half of the budget, with a gradient or without; None: it told nothing."""

    tokens_per_s: float | None
    age: float | None  # weight versions between making a token and training on it, mean
    waited: float | None  # share of the trainer's time in which it had no batch


@dataclass(frozen=True)
class Visits:
    """How often training prompts came. `learned`: reward of a prompt's last group less that of its first, the mean of
    those that came back, and `error` its standard error; it says what training on these prompts taught, not what else
    it did."""

    prompts: int
    came_back: int
    learned: float | None
    error: float | None


@dataclass(frozen=True)
class Right:
    """`tokens`: mean of the trained responses that came out right, in the first and in the later half; `spared`:
    candidates of the learned verdicts that a coin let go on, trained or not, and how many of these came out right.

    A filter leaves out groups that failed as a whole: of the trained ones alone more are right.
    """

    tokens: tuple[float | None, float | None]
    spared: tuple[int, int] | None  # None: there was no candidate


def add_target_option(parser) -> None:
    parser.add_argument("--target", type=float, help="held-out reward that all arms race to; default: the task's")


def target_of(parser, task: str, told: float | None, scale: str = "small") -> float:
    """The target of a comparison, the same for all of its arms; ends the command where none is known."""
    if scale == PRETRAINED:
        return FIRST_SHOWN if told is None else told
    if told is None and (scale, task) not in TARGETS:
        parser.error(f"no target is known for task {task!r} at scale {scale!r}: give --target, one for all arms")
    return TARGETS[scale, task] if told is None else told


def targets_of(scale: str) -> tuple[float, ...]:
    """The rewards that all arms race to beside the target."""
    return PRETRAINED_TARGETS if scale == PRETRAINED else ()


def races(result: Result, targets: Sequence[float]) -> dict[str, float | None]:
    """Seconds and samples to each of the targets; None where it was not held for HOLD evaluations in a row."""
    found: dict[str, float | None] = {}
    times = [at for at, _ in result.evaluations]
    for target in targets:
        reached = time_to_target(result.evaluations[1:], target)
        found[f"time to {target:.2f}, s"] = reached
        found[f"samples to {target:.2f}"] = None if reached is None else result.sampled_by[times.index(reached)]
    return found


def at_equal_samples(curves: Mapping[str, Mapping[str, list]]) -> dict[str, float | None]:
    """Arm -> its held-out reward when it had as many samples as the slowest arm at its last evaluation.

    `curves` maps the arms of one seed to [[samples, reward], ...]; between two evaluations the line that joins them.
    """
    equal = min((points[-1][0] for points in curves.values() if points), default=0)
    return {name: _on_line(points, equal) for name, points in curves.items()}


def _on_line(points: list, at: float) -> float | None:
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= at <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[0][1] if points else None


def time_said(result: Result) -> str:
    """The time to target in words; a run that ended at its first evaluation above the target did not miss it."""
    if result.time_to_target is not None:
        return f"{result.time_to_target:.0f} s"
    above = any(reward >= result.target for _, reward in result.evaluations[1:])
    return f"not in {HOLD} evaluations in a row" if above else "not reached"


def _evaluations(metrics: list[dict], ready: float) -> list[tuple[float, float]]:
    found = []
    for row in metrics:
        values = [v for k, v in row["data"].items() if k.startswith("val-core/") and "/mean@" in k]
        if values:
            found.append((row["time"] - ready, sum(values) / len(values)))
    return found


def rewards_of(responses: Sequence[Mapping]) -> dict[str, list[float]]:
    """Prompt -> mean reward of each of its groups; prompts and groups as they began. What was cut counts as what it
    scored.

    Whole groups alone: of those that the end of the run cut short the quick members are left, which are right more
    often. A row that does not know its prompt (older releases) is left out.
    """
    rows: dict[str, int] = {}
    scores: dict[str, dict[str, list[float]]] = {}
    for row in sorted(responses, key=lambda row: row["started"]):
        rows[row["group"]] = rows.get(row["group"], 0) + 1
        if row.get("prompt") is not None and row.get("score") is not None:
            scores.setdefault(row["prompt"], {}).setdefault(row["group"], []).append(row["score"])
    size = max(rows.values(), default=0)
    found = {prompt: [statistics.mean(of) for group, of in groups.items() if rows[group] == size]
             for prompt, groups in scores.items()}
    return {prompt: means for prompt, means in found.items() if means}


def visits_of(responses: Sequence[Mapping]) -> Visits:
    means = list(rewards_of(responses).values())
    learned = [of[-1] - of[0] for of in means if len(of) > 1]
    error = statistics.stdev(learned) / len(learned) ** 0.5 if len(learned) > 1 else None
    return Visits(len(means), len(learned), statistics.mean(learned) if learned else None, error)


def first_rewards(responses: Sequence[Mapping]) -> dict[str, float]:
    """Prompt -> mean reward of the first whole group of it, prompts as they began."""
    return {prompt: means[0] for prompt, means in rewards_of(responses).items()}


def on_same_prompts(rewards: Mapping[str, float], base: Mapping[str, float]) -> tuple[float, float] | None:
    """Reward less that of `base` (both of first_rewards), mean over the prompts that both had and its standard error.

    Of those prompts count the ones in the later half of both orders: before anything was learned there is nothing to
    compare, and what a sampler took early is not compared with what came late. Paired, a few hundred prompts tell 0.03
    apart, for which held-out evaluations would need several times as many. None below two prompts.
    """
    orders = [[prompt for prompt in arm if prompt in rewards and prompt in base] for arm in (base, rewards)]
    late = [set(order[len(order) // 2:]) for order in orders]
    less = [rewards[prompt] - base[prompt] for prompt in late[0] & late[1]]
    return (statistics.mean(less), statistics.stdev(less) / len(less) ** 0.5) if len(less) > 1 else None


def right_of(rows: Sequence[Mapping], half: float) -> Right:
    """`rows`: responses with their fates; `half`: the time at which the later half begins."""
    trained = [row for row in rows if row["trained"]]
    lengths = [[row["tokens"] for row in trained if row.get("correct") and (row["ended"] > half) is later]
               for later in (False, True)]
    candidates = [row for row in rows if row.get("candidate") and row["candidate_rule"] == Rule.VERDICT]
    spared = [row for row in candidates if row["exempted"] and (row["trained"] or row.get("score") is not None)]
    return Right(tuple(statistics.mean(each) if each else None for each in lengths),
                 (len(spared), sum(map(_is_right, spared))) if candidates else None)


def _is_right(row: Mapping) -> bool:
    """The trainer's word; what it did not take is judged by its score, as verl's rewards of these tasks are."""
    return bool(row.get("correct")) if row["trained"] else is_correct(row["score"], None, CORRECT_FROM)


def _windows(rows: list[dict]) -> dict[str, float]:
    """Bubble over all windows; the rollouter's pause is one number per version, repeated for each replica."""
    paused = {row["version"]: row["rollouter_paused"] for row in rows}
    return bubble(rows, sum(paused.values()))


def batches_of(rows: Sequence[Mapping]) -> Batches:
    """`rows`: of kind `events`, those of the trainer count."""
    steps = [row for row in rows if row["side"] == "train"]
    seconds, tokens = sum(row["seconds"] for row in steps), sum(row["tokens"] or 0 for row in steps)
    aged = [(row["age"], row["tokens"]) for row in steps if row["age"] is not None and row["tokens"]]
    return Batches(tokens / seconds if tokens else None,
                   sum(age * count for age, count in aged) / sum(count for _, count in aged) if aged else None,
                   sum(row["spent"]["wait"] for row in steps) / seconds if seconds else None)


def updates_of(rows: Sequence[Mapping], overrides: Sequence[str], steps: int) -> int:
    """Optimiser steps: mini-batches in what the trainer took (`rows`: of kind `events`), `steps` where it told nothing.

    verl counts a trigger as one step, and overlap control may have it take several mini-batches.
    """
    size = [int(line.partition("=")[2]) for line in overrides if line.startswith(MINI_BATCH)]
    taken = sum(row["groups"] for row in rows if row["side"] == "train")
    return max(steps, taken // size[-1] if size else 0)


def load(run_dir: Path, target: float, devices: int = 2) -> Result:
    """Everything that ended between ready and the end of the budget; `target` is that of all arms of the comparison."""
    arm = json.loads((run_dir / "arm.json").read_text())
    hooks = json.loads((run_dir / "esgrpo" / "hooks.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics-timed.jsonl").read_text().splitlines()]
    ready = arm["ready"]
    end = min(arm["ended"], ready + arm["budget_s"]) if arm["budget_s"] else arm["ended"]
    responses = [r for r in read(str(run_dir), "responses") if ready <= r["time"] <= end]
    rows = runs.with_fates(run_dir, ready, end)
    settled = runs.settled(rows)
    balance = token_balance(settled)
    half = (ready + end) / 2
    later = token_balance(row for row in settled if row["trained"] and row["time"] > half)  # when it was trained
    events = read(str(run_dir), "events")
    windows = [w for w in read(str(run_dir), "windows") if ready < w["start"] + w["seconds"] <= end]
    evaluations = [e for e in _evaluations(metrics, ready) if e[0] <= end - ready]
    reached = time_to_target(evaluations[1:], target)
    sampled_by = [sum(r["time"] <= ready + at for r in responses) for at, _ in evaluations]
    states: dict[str, int] = {}
    for report in hooks:
        for hook in report["hooks"]:
            states[hook["state"]] = states.get(hook["state"], 0) + 1
    times = [r["ended"] - r["started"] for r in responses] or [0.0]
    # verl logs a step when the next one begins: of a run of few steps the records know one more
    steps = max([*[int(m["data"]["training/global_step"]) for m in metrics
                   if "training/global_step" in m["data"] and m["time"] <= end],
                 *[int(row.get("step") or 0) for row in read(str(run_dir), "trained") if row["time"] <= end], 0])
    return Result(
        name=arm["name"], seconds=end - ready, evaluations=evaluations, target=target,
        time_to_target=reached, samples_to_target=None if reached is None else sum(
            r["time"] <= ready + reached for r in responses), steps=steps,
        updates=updates_of([row for row in events if row["time"] <= end], arm["overrides"], steps),
        responses=len(responses),
        bubble=_windows(windows), balance=balance,
        gradient_groups=len({books.response_of(r)[:-1] for r in settled if r["trained"] and r["gradient"]}),
        decoded=sum(r["tokens"] for r in responses),
        effective_per_s=balance["trained"] / ((end - ready) * devices), effective_later=later["trained"] / (end - half),
        batches_later=batches_of([row for row in events if half < row["time"] <= end]),
        tail_ratio=tail_ratio(times),
        lengths=[r["tokens"] for r in responses],
        curves={**runs.curves(evaluations, windows, rows, ready, target),
                "by_samples": [[count, reward] for count, (_, reward) in zip(sampled_by, evaluations, strict=True)]},
        first_rewards=first_rewards(responses),
        states=states, sampled_by=sampled_by,
        pruned=sum(r["outcome"] == Outcome.PRUNE for r in rows), partial=sum(r["attempts"] > 1 for r in responses),
        sampler=any(hook["slug"] in SAMPLERS and hook["state"] == "APPLIED"
                    for report in hooks for hook in report["hooks"]),
        modules=decided.of_directory(str(run_dir), hooks), peak_bytes=arm.get("peak_bytes", 0),
        visits=visits_of(responses), right=right_of(rows, half))


def module_rows(results: list[Result]) -> list[list[str]]:
    """One row for each module that was on in an arm: its decisions, or why it took none."""
    def cell(result, name):
        row = next((row for row in result.modules if row.module == name), None)
        if row is None or row.decided is None:
            return "not recorded"
        return "off" if not row.on and not row.decided else f"{row.decided}: {row.reason}" if row.reason else str(
            row.decided)

    on = dict.fromkeys(row.module for result in results for row in result.modules if row.on)
    return [[f"decisions: {name}", *[cell(result, name) for result in results]] for name in on]


def table(results: list[Result]) -> list[list[str]]:
    """Rows of text, the first one is the header."""
    def row(label, value):
        return [label, *[value(r) for r in results]]

    def share(cause):
        return lambda r: f"{100 * r.balance[cause] / max(1, r.balance['spent']):.1f} % ({r.balance[cause]})"

    def later(r, choice):
        rewards = [reward for _, reward in r.evaluations]
        return f"{choice(rewards):.3f}" if rewards[1:] else "no later evaluation" if rewards else "none"

    lengths = [sorted(r.lengths) or [0] for r in results]
    return [
        ["", *[r.name for r in results]],
        row("held-out reward, start", lambda r: f"{r.evaluations[0][1]:.3f}" if r.evaluations else "none"),
        row("held-out reward, last", lambda r: later(r, lambda rewards: rewards[-1])),
        row("held-out reward, best", lambda r: later(r, max)),
        row("time to target", lambda r: f"{time_said(r)} (>= {r.target:.3f})"),
        row("optimiser steps", lambda r: str(r.updates)),
        row("responses", lambda r: f"{r.responses} ({r.pruned} pruned, {r.partial} partial)"),
        row("bubble rate", lambda r: f"{r.bubble['bubble_rate']:.3f}"),
        *[row(f"  {cause}", lambda r, cause=cause: f"{r.bubble[cause]:.3f}")
          for cause in ("paused", "starved", "tail", "sync")],
        row("decoded tokens/s", lambda r: f"{r.decoded / r.seconds:.0f}"),
        row("effective tokens/s per device", lambda r: f"{r.effective_per_s:.1f}"),
        # the sampler selects what effective tokens count: beside an arm without it that must be said
        *([row("  of prompts chosen by the sampler", lambda r: "yes" if r.sampler else "no")]
          if len({r.sampler for r in results}) > 1 else []),
        *[row(f"wasted: {cause}", share(cause)) for cause in ("pruned", "zero_variance", "stale", "reprefill")],
        row("tail ratio (P99/P50 time)", lambda r: f"{r.tail_ratio:.1f}"),
        ["response length P50 / P99", *[f"{quantile(x, 0.5):.0f} / {quantile(x, 0.99):.0f}" for x in lengths]],
        *module_rows(results),
        row("hook states", lambda r: ", ".join(f"{n} {state}" for state, n in sorted(r.states.items()))),
    ]
