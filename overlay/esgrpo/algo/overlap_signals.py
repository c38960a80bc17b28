"""What the overlap controller is given in a run, from what both sides of the loop measured; and what a setting means
there. Pure, standard library only."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from esgrpo.algo.accounting import pace_of
from esgrpo.algo.overlap import Window
from esgrpo.algo.overlap_law import TINY, Limits, Setting

CONCURRENCY, STALENESS, TRIGGER = "concurrency", "staleness", "trigger"  # fields of Setting
THRESHOLD = "max_off_policy_threshold"  # of verl's v1 replay buffer: weight versions that a trained group may span
# Of a window's time: a validation that is longer changes what the window tells of rollout. In every step 2 to 5 % (now
# and then 14 %) of metrics and records follow verl's timer, too; validations were 78 to 88 % (H100s).
DISTURBS = 0.2
ROOM = 2  # of these: the one that a group is begun in, and one that a straggler may take beyond its batch


@dataclass(frozen=True)
class Rollout:
    """What the rollouter tells at a weight version. None: not measured. Of verl's settings these are those in force."""

    concurrency: int  # groups in flight at most
    left: int  # groups that the trainer will still be given, itself not asked: neither trained nor in its batch
    seconds: float | None = None
    in_flight: float | None = None
    tokens: int | None = None  # decoded by all replicas, less those of groups that nobody will train
    step_s: float | None = None  # of an engine's step that only decodes, and the share of it that is not the batch's
    decode_level: float | None = None
    pause_s: float | None = None
    surprisal: float | None = None  # mean, nats a token
    null_share: float | None = None  # of the groups that `null_groups=spare` may leave out


@dataclass(frozen=True)
class Run:
    """What a run's configuration says of the limits. Sizes in groups."""

    mini_batch: int
    triggers_per_version: int
    replicas: int
    capacity: int  # in flight at most: of the engines, or as set
    max_staleness: float
    max_batches: int
    fixed: Collection[str] = ()  # of the settings above


def of_the_version(windows: Sequence[Mapping]) -> list[Mapping]:
    """Without those that began with an older version: of a replica on the trainer's devices, which closes one at the
    next time that it is lent to rollout, after any number of versions; what it made in one of them nobody knows."""
    newest = max((window["version"] for window in windows), default=0)
    return [window for window in windows if window["version"] == newest]


def measured(concurrency: int, windows: Sequence[Mapping], seconds: float | None, in_flight: float | None,
             left: int = 0, left_out_tokens: int = 0, null_share: float | None = None) -> Rollout:
    """`windows`: of the engines, closed since the version before; `left_out_tokens`: of groups that finished in it and
    whose place was given to others."""
    windows = of_the_version(windows)
    step_s, decode_level = pace_of(window.get("pace", {}) for window in windows)
    counted = sum(window["surprisal_tokens"] for window in windows)
    return Rollout(
        concurrency=concurrency, left=left, seconds=seconds, in_flight=in_flight,
        tokens=max(0, sum(window["tokens"] for window in windows) - left_out_tokens) if windows else None,
        step_s=step_s, decode_level=decode_level, pause_s=pause(windows),
        surprisal=sum(window["surprisal"] for window in windows) / counted if counted else None, null_share=null_share)


def decoding(windows: Sequence[Mapping], seconds: float, group_size: int) -> float | None:
    """Groups in the engines, mean over `seconds`, by the responses that decoded: where nobody counts groups. A group of
    which some responses have ended counts in part."""
    used = sum(window["used"] for window in of_the_version(windows))
    return used / group_size / seconds if windows and seconds > 0 else None


def start_of(rollout: Rollout, staleness: float, trigger: int, triggers_per_version: int) -> Setting:
    """The user's setting, the staleness as verl makes use of it: it begins whole groups, rounded down."""
    version = trigger * triggers_per_version
    return Setting(rollout.concurrency, (int(version * (1 + staleness)) - version) / version, trigger)


def limits_of(run: Run, start: Setting) -> Limits:
    """Bounds that hold the start setting. A batch of whole mini-batches is divisible by whatever verl divides a
    mini-batch by, so that the data-parallel size asks for nothing more."""
    def bounds(name: str, low, high):
        value = getattr(start, name)
        return (value, value) if name in run.fixed else (min(low, value), max(high, value))

    return Limits(bounds(CONCURRENCY, run.replicas, run.capacity), bounds(STALENESS, 0.0, run.max_staleness),
                  bounds(TRIGGER, run.mini_batch, run.max_batches * run.mini_batch), run.mini_batch,
                  triggers_per_version=run.triggers_per_version)


def begun_at_most(setting: Setting, triggers_per_version: int) -> int:
    """Groups that rollout may begin in a version, those counted that were in process at its start."""
    return int(setting.trigger * triggers_per_version * (1 + setting.staleness) + TINY)


def to_begin(batch: int, owed: int) -> tuple[int, int]:
    """Prompts that a step begins instead of `batch`, one at least, and what is still owed then: above 0 to begin on
    top, below 0 to leave out."""
    number = max(1, batch + owed)
    return number, owed - (number - batch)


def more_ahead(before: Setting, after: Setting, limits: Limits) -> int:
    """Groups in process at a weight sync, more (or fewer) than before."""
    return round(limits.in_process(after) - limits.in_process(before))


def most_ahead(wanted: float, threshold: int | None, start: float) -> float:
    """The largest staleness at which a threshold that stays drops hardly anything; at least what there is."""
    return max(start, wanted if threshold is None else min(wanted, threshold - ROOM))


def threshold_for(threshold: int, start: float, staleness: float) -> int:
    """The threshold that leaves as much room above `staleness` as the run's own leaves above its start."""
    return max(threshold, threshold + math.ceil(staleness) - math.ceil(start))


def pause(windows: Sequence[Mapping]) -> float | None:
    """Seconds of a version in which a replica decodes nothing because of the weight sync, mean over engine windows with
    room for requests: the sync's own, or what the requests that it aborted lost until they came back, in seconds of all
    that run or would have."""
    found = []
    for window in windows:
        if window["capacity"] > 0:
            away = window.get("away", 0.0)
            lost = window["seconds"] * away / (window["used"] + away) if away > 0 else 0.0
            found.append(max(window["sync"] / window["capacity"], lost))
    return sum(found) / len(found) if found else None


def validation(steps: Sequence[Mapping]) -> float:
    """Seconds that the trainer's batches were held up by validation."""
    return sum(step["spent"].get("validation", 0.0) for step in steps)


def window(version: int, rollout: Rollout | None, steps: Sequence[Mapping], mini_batch: int,
           validated_s: float = 0.0) -> Window:
    """Of one weight version. `steps`: rows of kind `events` of the trainer's batches, the last one ends it.

    validated_s: seconds of validation that rollout's time began with. verl validates after a weight sync, on the
    replicas, and its rollouter begins nothing meanwhile: what such a version tells of rollout is no rate of it.
    """
    found = Window(version=version)
    if rollout is not None and validated_s <= DISTURBS * (rollout.seconds or 0.0):
        found = replace(found, seconds=rollout.seconds, tokens=rollout.tokens, in_flight=rollout.in_flight,
                        step_s=rollout.step_s, decode_level=rollout.decode_level, pause_s=rollout.pause_s,
                        entropy=rollout.surprisal, null_share=rollout.null_share)
    if not steps:
        return found
    groups, tokens = (sum(step[name] or 0 for step in steps) for name in ("groups", "tokens"))
    aged = [(step["age"], step["tokens"]) for step in steps if step["age"] is not None and step["tokens"]]
    updates = groups / mini_batch  # optimiser steps of a version; a token's own lies half of them in, on the mean
    spent = {part: sum(step["spent"][part] for step in steps) for part in ("train", "sync", "other", "wait")}
    last = steps[-1]
    return replace(
        found, group_tokens=tokens / groups if groups and tokens else None, trained_tokens=tokens or None,
        train_s=spent["train"], sync_s=spent["sync"] + spent["other"], wait_s=spent["wait"],
        age=sum(age * count for age, count in aged) / sum(count for _, count in aged) * updates + (updates - 1) / 2
        if aged else None,
        entropy=found.entropy if last["entropy"] is None else last["entropy"], loss=last["loss"], kl=last["kl"],
        grad_norm=last["grad_norm"])


def at_the_end(setting: Setting, start: Setting, limits: Limits, left: int) -> Setting:
    """A trigger that was raised comes down to what is left of the data, in whole units: verl throws away what does not
    fill the last batch."""
    if setting.trigger <= start.trigger or left >= limits.groups(setting):
        return setting
    most = left // (limits.mini_batch * limits.triggers_per_version) * limits.mini_batch
    return replace(setting, trigger=max(most, limits.trigger[0]))
