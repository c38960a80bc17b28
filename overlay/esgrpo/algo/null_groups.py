"""Finished groups without a gradient in a loop that trains groups as they come: trained, or another prompt instead.

Rewards that are all alike give GRPO advantages of 0: the group costs the trainer a place in its mini-batch, and nothing
is learned from it. DAPO (arXiv 2503.14476, dynamic sampling) keeps no such group and samples until the batch is full.
That pays while the trainer is the slower side. Where it waits for groups, each one that is left out makes it wait for
another, and the optimiser steps are fewer: `spare` leaves one out only while a whole batch waits already, and before
that no more than the trainer left waiting when it took its last two batches; `replace` always. verl's v1 trainers have
that filter themselves and judge when a batch is asked for; there `spare` begins, under `separate_async`, other prompts
before that.

A reward that is the same for all must not starve the trainer: after MOST_BATCHES batches without a gradient one such
group is trained, where verl's DAPO recipe would end the run (max_num_gen_batches=10). Pure.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import sqrt

from esgrpo.algo.terms import NullGroups

REWARD = "reward"  # algorithm.filter_groups.metric of the reward itself; others are what the reward function returns
MOST_BATCHES = 10  # of groups left out in a row
REMEMBERED = 7 / 8  # of what was counted a step before: the share of the last eight steps or so
MOST_LEFT_OUT = 0.9  # of what is begun ahead, however many the filter leaves out
DEVIATIONS = 2.0  # of how many it leaves out: the trainer waits for chance in one step of fifty
# verl's estimators that compare a response with its group alone (`verl.trainer.ppo.core_algos`), and ours; the others
# whiten over the batch or ask a critic or another policy, and rewards that are alike give advantages there
OF_THE_GROUP = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
                          "grpo_segment"})


def alike_is_null(estimator: str, kl_in_reward: bool) -> bool:
    """Whether rewards that are all alike give a group advantages of 0. `kl_in_reward`: verl subtracts a KL term from
    the rewards of tokens (`algorithm.use_kl_in_reward`), and no two responses have the same one."""
    return estimator in OF_THE_GROUP and not kl_in_reward


def costs_rollout(mode: str, foreseen: bool) -> bool:
    """Whether the trainer waits for what is made instead of a group that was left out. `spare` leaves out what nobody
    waits for; a group that the resolved rule ended, `foreseen`, is left out whatever waits."""
    return foreseen or mode == NullGroups.REPLACE


def spare_share(mode: str, nulls: int, judged: int) -> float | None:
    """Share of finished groups that `spare` may leave out, `nulls` of `judged`; None under another mode, or of none."""
    return nulls / judged if mode == NullGroups.SPARE and judged else None


def a_batch_can_wait(staleness: float, batches: int) -> bool:
    """Whether a whole batch can wait for the trainer while it trains another: of a version's prompts, which are
    `batches` x (1 + `staleness`) batches (verl's `FullyAsyncRollouter.max_required_samples`)."""
    return batches * (1.0 + staleness) >= 2.0


def will_be_left_out(alike: Set[str], too_old: Set[str]) -> int:
    """Finished groups for which a step of `separate_async` begins others, of those that verl's filter will evict,
    `alike`. Not those that are `too_old`, too: what more is in process makes the next ones older still."""
    return len(alike - too_old)


def wanted_at_first(in_process: int, left_out: int, warmup: int, controlled: bool) -> int:
    """What stays in process between two steps of a start: verl's `warmup`, for which it counts all groups. A checkpoint
    brings back what was begun on top, too, which is a measure only where the overlap controller began it."""
    return in_process if controlled else min(in_process + left_out, warmup)


@dataclass
class LeftOutShare:
    """Share of finished groups that verl's filter leaves out, over the last steps."""

    trained: float = 0.0  # groups, the earlier the less they count
    left_out: float = 0.0
    steps: int = 0

    def note(self, trained: int, left_out: int) -> None:
        """Of the step that ended."""
        self.trained = REMEMBERED * self.trained + trained
        self.left_out = REMEMBERED * self.left_out + left_out
        self.steps += 1

    def foreseen(self, batch: int, visible: int) -> float:
        """Of groups that have not ended, at most MOST_LEFT_OUT. Before a step has ended `visible`, the finished groups
        that will be left out, beside a `batch` of others: a few are no measure."""
        left_out, trained = (self.left_out, self.trained) if self.steps else (visible, batch)
        return min(MOST_LEFT_OUT, left_out / (left_out + trained)) if left_out else 0.0


def to_begin(batch: int, wanted: int, good: int, running: int, left_out: int, share: float) -> int:
    """Prompts that a step begins instead of verl's `batch`, one at least, so that when it has taken a batch as many
    groups that can be trained are expected in process as `wanted`.

    `good`: finished groups that can be trained, `running`: not finished, of which `share` will be left out, `left_out`:
    finished, in whose place verl puts other prompts as soon as it looks: too late for this step and in time for the
    next. How many are left out is a matter of chance: DEVIATIONS of it are wanted on top (of the groups begun for n
    that can be trained n x share / (1 - share)^2 is the variance, in groups that can be trained n x share).
    """
    expected = good + running * (1.0 - share)
    on_top = DEVIATIONS * sqrt((batch + wanted) * share)
    return max(1, int((batch + wanted + on_top - expected) / (1.0 - share)) - left_out)


@dataclass
class NullFilter:
    """Of a rollouter. Sizes in groups."""

    in_a_row: int = 0  # left out since one was trained
    left: int = 0  # waiting, as the last group that was judged left it
    beyond: tuple[int, int] = (0, 0)  # what the trainer left waiting as it took its last two batches
    early: int = 0  # left out since, while no batch waited

    def leaves_out(self, mode: str, alike: bool, waiting: int, batch: int) -> bool:
        """Whether a finished group gives its place to another prompt.

        `alike`: all its rewards are; `waiting`: groups that wait for the trainer, `batch`: what it takes at once.
        """
        if self.left - waiting > batch // 2 or waiting == 0 < self.left:  # less are groups that end at one time
            self.beyond, self.early = (self.beyond[1], min(waiting, max(0, self.left - batch))), 0
        self.left = waiting
        spare = waiting >= batch or self.early < min(self.beyond)
        wanted = mode == NullGroups.REPLACE or mode == NullGroups.SPARE and spare
        return alike and wanted and self.in_a_row < MOST_BATCHES * max(1, batch)

    def note(self, left_out: bool, batch: int) -> None:
        """Of the group that was judged, or left out unseen."""
        self.in_a_row = self.in_a_row + 1 if left_out else 0
        self.early += left_out and self.left < batch
        self.left += not left_out
