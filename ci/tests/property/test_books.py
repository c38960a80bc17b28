"""Books are the truth: any run of draws, ends, updates, checkpoints, crashes and restarts, told by its rows alone."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo import books

SIZE = 2  # responses of a group


class Run(RuleBasedStateMachine):
    """A run as it happens, beside the rows that it writes. `kept`: what the present weights and data loader know."""

    @initialize(restored=st.booleans())
    def begin(self, restored):
        self.restored = restored  # v1: ids of groups are unique, and finished groups survive in the checkpoint
        self.rows, self.now = {}, 0
        self.restart, self.version, self.number, self.unique = 0, 0, 0, 0
        self.kept = {"drawn": 0, "fates": {}, "groups": {}, "chain": [0]}  # draw -> fate; (start, group) -> fate
        self.live = {}  # group -> [draw, start of origin, finished]
        self.ended, self.given_up = [], set()  # responses; (start, group) that were given up
        self.ever_trained, self.saved = set(), {}
        self.write("start", resumed_step=0, drawn=0, prompts_per_epoch=4)

    def write(self, kind, **row):
        self.now += 1
        self.rows.setdefault(kind, []).append({"time": self.now, "run": "r", "restart": self.restart, **row})

    def named(self):
        self.number, self.unique = self.number + 1, self.unique + 1
        return f"uuid_{self.unique}" if self.restored else f"uid_{self.number}"

    @rule()
    def submit(self):
        self.kept["drawn"] += 1
        group, draw = self.named(), self.kept["drawn"]
        self.live[group] = [draw, self.restart, False]
        self.kept["fates"][draw] = "open"
        self.write("submitted", group=group, prompt="k", draw=draw)

    def some(self, data, finished):
        return data.draw(st.sampled_from([group for group, (_, _, done) in self.live.items() if done == finished]))

    @precondition(lambda self: any(not done for _, _, done in self.live.values()))
    @rule(data=st.data())
    def finish(self, data):
        group = self.some(data, False)
        self.live[group][2] = True
        for member in range(SIZE):
            self.ended.append((self.restart, group, member))
            self.write("responses", group=group, member=member)

    @precondition(lambda self: any(done for _, _, done in self.live.values()))
    @rule(data=st.data(), told=st.booleans(), pruned=st.booleans())
    def train(self, data, told, pruned):
        group = self.some(data, True)
        draw, origin, _ = self.live.pop(group)
        self.kept["fates"][draw] = self.kept["groups"][origin, group] = "trained"
        self.ever_trained.add((origin, group))
        self.write("batch", step=self.version + 1, groups=[group])
        if told:  # a crash may come before the rows
            for member in range(SIZE):
                self.write("trained", restart=origin, trained_in=self.restart, step=self.version + 1, group=group,
                           member=member, pruned=pruned and member == 0)
            if pruned:
                self.kept["groups"][origin, group] = "pruned"

    @precondition(lambda self: any(done for _, _, done in self.live.values()))
    @rule(data=st.data(), kind=st.sampled_from((*books.GIVEN_UP, books.FAILED)))
    def give_up(self, data, kind):
        group = self.some(data, True)
        draw, origin, _ = self.live.pop(group)
        self.kept["fates"][draw] = self.kept["groups"][origin, group] = kind
        self.given_up.add((self.restart, origin, group, kind))
        self.write(kind, group=group)

    @rule()
    def checkpoint(self):
        self.version += 1
        self.write("checkpoint", step=self.version, drawn=self.kept["drawn"])
        self.saved[self.version] = copy.deepcopy((self.kept, self.live))

    @rule(data=st.data())
    def crash_and_resume(self, data):
        blank = {"drawn": 0, "fates": {}, "groups": {}, "chain": []}, {}
        step = data.draw(st.sampled_from([0, *self.saved]))
        kept, live = copy.deepcopy(self.saved[step] if step else blank)
        self.restart += 1
        self.version, self.kept, self.live, self.number = step, kept, {}, step * 3
        kept["chain"].append(self.restart)
        self.write("start", resumed_step=step, drawn=kept["drawn"], prompts_per_epoch=4)
        for group, (draw, origin, finished) in live.items():
            if self.restored and finished:
                self.write("restored", groups=[group])
                self.live[group] = [draw, origin, True]
            elif self.restored:
                self.write("reissued", group=group, draw=None)
                self.live[group] = [draw, self.restart, False]
            else:
                again = self.named()
                self.write("reissued", group=again, draw=draw, was=group)
                self.live[again] = [draw, self.restart, False]

    def fate_of(self, start, group):
        """Of a response: by the present weights, or by what was thrown away."""
        known = self.kept["groups"].get((start, group))
        if known:
            return known
        if (start, group) in {(origin, group) for group, (_, origin, _) in self.live.items()}:
            return "open"
        gone = [kind for restart, origin, name, kind in self.given_up
                if (origin, name) == (start, group) and restart in self.kept["chain"]]
        if gone:
            return gone[0]
        return "rolled_back" if (start, group) in self.ever_trained else "thrown_away"

    @invariant()
    def books_are_the_truth(self):
        if not self.rows:
            return
        found = books.settle(self.rows)
        assert found.balanced, found.problems
        expected = Counter(self.kept["fates"].values())
        assert {k: n for k, n in found.prompts.items() if n and k != "drawn"} == dict(expected)
        assert found.prompts.get("drawn", 0) == self.kept["drawn"]
        fates = Counter()
        for start, group, member in self.ended:
            fate = self.fate_of(start, group)
            fates["trained" if fate == "pruned" and member else fate] += 1
        assert {k: n for k, n in found.responses.items() if n and k != "generated"} == dict(fates)
        assert found.responses["generated"] == len(self.ended) == sum(fates.values())


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def story() -> dict:
    """Three prompts in two starts: one trained before the checkpoint, one after it and again, one in flight."""
    rows: dict = {}
    clock = iter(range(1000))

    def write(kind, restart, **row):
        rows.setdefault(kind, []).append({"time": next(clock), "run": "r", "restart": restart, **row})

    write("start", 0, resumed_step=0, drawn=0, prompts_per_epoch=3)
    for draw in (1, 2):
        write("submitted", 0, group=f"g{draw}", draw=draw)
        write("responses", 0, group=f"g{draw}", member=0)
    write("batch", 0, step=1, groups=["g1"])
    write("trained", 0, group="g1", member=0, step=1)
    write("checkpoint", 0, step=1)
    write("submitted", 0, group="g3", draw=3)
    write("batch", 0, step=2, groups=["g2"])
    write("trained", 0, group="g2", member=0, step=2)
    write("start", 1, resumed_step=1, drawn=2, prompts_per_epoch=3)
    write("reissued", 1, group="g3", draw=2, was="g2")
    write("submitted", 1, group="g4", draw=3)
    for group in ("g3", "g4"):
        write("responses", 1, group=group, member=0)
        write("trained", 1, group=group, member=0, step=2)
    write("batch", 1, step=2, groups=["g3", "g4"])
    return rows


def test_a_story_balances():
    found = books.settle(story())
    assert found.balanced and found.prompts == {"trained": 3, "drawn": 3}
    assert found.responses == {"generated": 4, "trained": 3, "rolled_back": 1}
    assert found.epochs == [{"epoch": 0, "prompts": 3, "trained": 3}]
    assert found.starts[1] == {"restart": 1, "drawn_again": 1, "in_flight": 1, "came_back": 1, "missing": 0}
    assert books.rolled_back(story()["trained"], story()) == {("r", 0, "g2", 0)}


@pytest.mark.parametrize(("change", "said"), [
    (lambda rows: rows.pop("reissued"), "in flight at a restart did not come back"),
    (lambda rows: rows["submitted"].pop(0), "1 prompts (1) have no record"),
    (lambda rows: rows["batch"].append({**rows["batch"][-1], "groups": ["g4"]}), "1 prompts (3) ended or were issued"),
    (lambda rows: rows["reissued"][0].update(draw=1), "1 prompts (1) ended or were issued"),
    (lambda rows: rows["trained"].append(rows["trained"][-1]), "responses (g4/0 of start 1) were trained more"),
    (lambda rows: rows["responses"].append(rows["responses"][-1]), "ended more than once"),
    (lambda rows: rows["responses"].pop(), "without a record of their end"),
    (lambda rows: rows["submitted"].pop(), "trained or given up without being drawn"),
    (lambda rows: rows["submitted"].insert(1, {**rows["submitted"][0], "group": "g9"}), "1 prompts (1) ended or were"),
    (lambda rows: rows["start"][1].update(drawn=4), "1 prompts (4) have no record"),
])
def test_what_does_not_balance_is_named(change, said):
    rows = story()
    change(rows)
    found = books.settle(rows)
    assert not found.balanced and any(said in problem for problem in found.problems), found.problems


def test_a_prompt_that_did_not_come_back_is_counted_as_missing():
    rows = story()
    del rows["reissued"]
    assert books.settle(rows).prompts["missing"] == 1


def test_a_run_may_begin_with_the_checkpoint_of_another():
    """Its first draw is the one after those of that checkpoint, and epochs are those of the data loader."""
    rows = {"start": [{"time": 0, "restart": 0, "resumed_step": 5, "drawn": 7, "prompts_per_epoch": 8}],
            "submitted": [{"time": draw, "restart": 0, "group": f"g{draw}", "draw": draw} for draw in (8, 9, 10)]}
    found = books.settle(rows)
    assert found.balanced and found.prompts == {"open": 3, "drawn": 3}
    assert found.epochs == [{"epoch": 0, "prompts": 8, "open": 1}, {"epoch": 1, "prompts": 8, "open": 2}]
    del rows["submitted"][0]
    assert books.settle(rows).problems == ["1 prompts (8) have no record of their draw"]


@pytest.mark.parametrize("missing, named", [(5, "2, 3, 4, 5, 6"), (6, "2, 3, 4, 5, 6, ...")])
def test_a_line_names_the_first_prompts_and_says_that_there_are_more(missing, named):
    rows = {"start": [{"time": 0, "restart": 0, "resumed_step": 0, "drawn": 0}],
            "submitted": [{"time": draw, "restart": 0, "group": f"g{draw}", "draw": draw} for draw in (1, missing + 2)]}
    assert books.settle(rows).problems == [f"{missing} prompts ({named}) have no record of their draw"]


def test_a_row_of_a_start_that_nothing_goes_back_to_is_not_kept():
    rows = story()
    rows["trained"].append({"time": 99, "run": "r", "restart": 7, "group": "g", "member": 0})  # without a step, too
    chain = books.lineage(rows["start"], rows["checkpoint"])
    assert [books.is_kept(row, chain) for row in rows["trained"]] == [True, False, True, True, False]
    assert books.rolled_back(rows["trained"], rows) == {("r", 0, "g2", 0), ("r", 7, "g", 0)}


def test_a_restart_whose_checkpoint_has_no_row_goes_back_to_the_start_before_it():
    starts = [{"restart": number, "resumed_step": 3 * number, "drawn": number} for number in range(3)]
    chain = books.lineage(starts, [{"step": 6, "restart": 2}])  # its own, of the same step: it did not begin with that
    assert chain == [books.Link(0, 3, 0), books.Link(1, 6, 1), books.Link(2, math.inf, 2)]


def test_records_of_older_releases_settle_as_they_are():
    old = [{"time": 1.0, "group": "a", "member": 0}, {"time": 2.0, "group": "a", "member": 1}]
    found = books.settle({"responses": old, "trained": [{**old[0], "pruned": True}, {**old[1], "pruned": False}]})
    assert found.balanced and found.responses == {"generated": 2, "trained": 1, "pruned": 1} and not found.prompts
    assert not books.rolled_back(old, {"trained": old})


def test_dropped_rows_are_named_beside_what_they_may_explain():
    rows = story()
    assert books.settle({**rows, "dropped": [{"time": 0, "restart": 0, "rows": 2}]}).balanced
    rows["responses"].pop()
    problems = books.settle({**rows, "dropped": [{"time": 0, "restart": 0, "rows": 2}]}).problems
    assert problems[-1] == "2 rows could not be written"
