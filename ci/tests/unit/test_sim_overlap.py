"""The simulated fully async loop: its bounds, its books, its roles beside verl's own policy, and its command."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from bench.sim import async_loop, null_groups
from bench.sim.async_loop import MINI_BATCH, Case, Loop, Roles
from bench.sim.overlap import LIMITS, cases, main
from esgrpo.algo.overlap import Controller
from esgrpo.algo.overlap_law import Setting

SMALL = Case("small", 1.0, "code", groups=96)


class Watched(Loop):
    """Checks the loop's bounds whenever time passes."""

    def _pass(self, then):
        assert then >= self.now
        assert len(self.missing) <= self.setting.concurrency
        assert self.begun <= self.setting.trigger * (1 + self.setting.staleness) + 1e-6
        super()._pass(then)


@pytest.mark.parametrize("setting", [Setting(8, 0.0, 16), Setting(32, 0.5, 32), Setting(96, 4.0, 16)])
def test_the_loop_keeps_its_bounds_and_its_books(setting):
    loop = Watched(SMALL, setting)
    fresh = loop.run()
    assert loop.trained >= SMALL.groups and 0 < fresh <= loop.tokens / loop.now
    begun = async_loop.prompts("code", SMALL.groups + async_loop.AHEAD, 1)[:loop.trained + len(loop.spans)]
    assert set(loop.spans) == {*loop.missing, *loop.queue}
    assert loop.tokens == sum(sample.tokens for group in begun if group.index not in loop.spans
                              for sample in group.samples)


def test_without_staleness_and_with_one_mini_batch_every_token_is_fresh():
    loop = Loop(SMALL, Setting(64, 0.0, MINI_BATCH))
    loop.run()
    assert loop.fresh == loop.tokens


def test_age_costs_and_throughput_rises_with_the_bound():
    tight, wide = (Loop(SMALL, Setting(64, staleness, MINI_BATCH)) for staleness in (0.5, 4.0))
    for loop in (tight, wide):
        loop.run()
    assert wide.tokens / wide.now > tight.tokens / tight.now
    assert wide.fresh / wide.tokens < tight.fresh / tight.tokens


@pytest.mark.parametrize("mode", ["train", "spare", "replace"])
def test_a_group_that_is_left_out_gives_its_place_to_another(mode):
    case = replace(SMALL, ratio=8.0, null_share=0.5, null_groups=mode)
    loop = Watched(case, Setting(64, 2.0, MINI_BATCH))
    loop.run()
    assert set(loop.spans) == {*loop.missing, *loop.queue} >= loop.nulls
    assert (loop.left_out > 0) == (mode != "train")
    share = loop.useful / loop.trained
    assert (share == 1) == (mode == "replace") and share > 0.3


@pytest.mark.parametrize("mode, less", [("train", False), ("spare", False), ("replace", True)])
def test_the_controller_hears_of_tokens_that_someone_will_train(mode, less):
    class Heard(Controller):
        tokens = 0.0

        def observe(self, window):
            self.tokens += window.tokens

    setting = Setting(64, 2.0, MINI_BATCH)
    control = Heard(setting, LIMITS, 4.0, lambda: 0.0)
    loop = Loop(replace(SMALL, ratio=8.0, null_share=0.5, null_groups=mode), setting, control)
    loop.run()
    assert (control.tokens < 0.7 * loop.decoded) == less


def test_the_filters_command_names_every_mode(capsys, monkeypatch):
    monkeypatch.setattr(null_groups, "RATIOS", (8.0,))
    monkeypatch.setattr(null_groups, "SHARES", (0.5,))
    assert null_groups.main(["--json", "--groups", "32", "--seeds", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"] and all({"train", "spare", "replace"} < set(case) for case in told["cases"])
    assert null_groups.main(["--groups", "32", "--seeds", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(told["cases"]) + 1


def test_lent_and_taken_back():
    loop = Loop(SMALL, Setting(32, 0.5, 32))
    lent = []
    switch = loop._switch
    loop._switch = lambda lend: (lent.append(lend), switch(lend))
    loop.run()
    assert lent[:2] == [True, False] and all(first != then for first, then in zip(lent, lent[1:], strict=False))


def test_the_roles_are_moved_as_verl_moves_them():
    """Against verl's own class, on random cycles."""
    from verl.experimental.fully_async_policy.dynamic_schedule.base import DynamicScheduleContext
    from verl.experimental.fully_async_policy.dynamic_schedule.default_policy import DefaultDynamicSchedulePolicy

    rng = random.Random(1)
    for _ in range(30):
        ours, theirs = Roles(), DefaultDynamicSchedulePolicy(0.3)
        context = DynamicScheduleContext(16, 1, 0, 0, 0)
        for version in range(1, 40):
            ours.generated += rng.randint(4, 28)
            ours.waited, ours.waited_s = rng.choice([(0, 0.0), (rng.randint(1, 16), rng.uniform(0.1, 60))])
            context.total_generated_samples, context.expected_samples = ours.generated, 16 * version
            context.step_wait_times, context.step_wait_samples = [ours.waited_s], [ours.waited]
            lends = ours.lends(16)
            assert lends == theirs.should_activate_after_step(version, False, context)
            ours.switched = rng.choice([0.0, 3.0]) if lends else 0.0
            context.last_activate_duration_s, context.last_deactivate_duration_s = ours.switched, 0.0
            ours.adapt(16)
            theirs.update_after_step(version, context)
            assert ours.share == pytest.approx(theirs.deactivate_ratio)


def test_covers_what_it_says():
    found = cases()
    assert len({case.ratio for case in found if case.workload == "math"}) >= 6
    assert len({case.workload for case in found}) >= 3 and {case.shift for case in found} >= {0.5, 1.0, 2.0}


def test_the_controller_can_be_played_under_a_group_filter(capsys):
    assert main(["--json", "--null-groups", "spare", "--case", "ratio 8", "--groups", "96"]) == 0
    case, = json.loads(capsys.readouterr().out)["cases"]
    assert case["name"].endswith("spare") and case["against_best_fixed"] > 0


def test_the_command_is_repeatable_and_names_both_rivals(capsys):
    told = []
    for _ in range(2):
        assert main(["--json", "--case", "code, ratio 4", "--groups", "96"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    case, = json.loads(told[0])["cases"]
    assert case["name"] == "code, ratio 4" and case["against_best_fixed"] > 0 and case["against_verl_default"] > 0
