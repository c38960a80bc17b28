"""The comparison of arms: when a target counts as reached, and what is said where it does not."""

import dataclasses
import json
import random
from types import SimpleNamespace

import pytest

from bench.common import compare, training
from ci.tests.unit.test_bench_robustness import write_run

TARGET = 0.6


@pytest.mark.parametrize("rewards, reached, said", [
    ([0.5, 0.65, 0.7], 20.0, "20 s"), ([0.5, 0.65, 0.55, 0.7, 0.6], 60.0, "60 s"),
    ([0.5, 0.65], None, "not in 2 evaluations in a row"), ([0.5, 0.65, 0.55], None, "not in 2 evaluations in a row"),
    ([0.7, 0.5], None, "not reached"), ([0.5], None, "not reached"), ([], None, "not reached")])
def test_a_target_counts_when_it_holds(rewards, reached, said):
    evaluations = [(20.0 * number, reward) for number, reward in enumerate(rewards)]
    found = compare.time_to_target(evaluations[1:], TARGET)
    assert found == reached
    assert compare.time_said(SimpleNamespace(time_to_target=found, target=TARGET, evaluations=evaluations)) == said


def test_the_last_optimiser_step_counts_although_verl_logs_it_with_the_next(tmp_path):
    write_run(tmp_path / "run", [], [0.5, 0.5, 0.5])  # verl has logged two
    assert compare.load(tmp_path / "run", TARGET).steps == 2
    with open(tmp_path / "run" / "esgrpo" / "trained-node-1.jsonl", "w") as file:
        for member, (step, time) in enumerate(((3, 199.0), (4, 201.0))):  # the last one after the run's end
            file.write(json.dumps({"time": time, "run": "r", "restart": 0, "group": "g", "member": member, "step": step,
                                   "trained": True, "score": 1.0, "gradient": True}) + "\n")
    assert compare.load(tmp_path / "run", TARGET).steps == 3


def test_a_single_evaluation_is_the_start_alone(tmp_path):
    write_run(tmp_path / "run", [], [0.5, 0.5, 0.5])
    result = compare.load(tmp_path / "run", TARGET)
    for evaluations, said in (([], ["none"] * 3), ([(0.0, 0.5)], ["0.500", *["no later evaluation"] * 2]),
                              ([(0.0, 0.5), (9.0, 0.75), (20.0, 0.25)], ["0.500", "0.250", "0.750"])):
        rows = compare.table([dataclasses.replace(result, evaluations=evaluations)])
        assert [row[1] for row in rows if row[0].startswith("held-out reward")] == said


def test_what_a_group_with_gradient_costs_and_what_the_later_half_brings(tmp_path):
    write_run(tmp_path / "run", [], [0.5, 0.5, 0.5])
    run = json.loads((tmp_path / "run" / "arm.json").read_text())
    begin, end = run["ready"], min(run["ended"], run["ready"] + (run["budget_s"] or run["ended"]))
    folder, seconds = tmp_path / "run" / "esgrpo", end - begin
    rows = [{"time": begin + part * seconds, "ended": begin + part * seconds, "started": begin, "run": "r",
             "restart": 0, "group": group, "member": member, "tokens": tokens, "reprefill": 0,
             "outcome": "finish", "attempts": 1}
            for group, part, tokens in (("a", 0.2, 10), ("b", 0.3, 30), ("c", 0.8, 50)) for member in (0, 1)]
    (folder / "responses-node-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trained-node-1.jsonl").write_text("".join(
        json.dumps({**row, "time": max(row["time"], begin + 0.6 * seconds), "step": 1, "trained": True, "score": 1.0,
                    "gradient": row["group"] != "b"}) + "\n" for row in rows))
    result = compare.load(tmp_path / "run", TARGET)
    assert result.gradient_groups == 2 and result.balance["spent"] == 180 and result.balance["trained"] == 120
    assert result.effective_later == pytest.approx(120 / (seconds / 2))  # a ended in the first half, trained in this


def test_a_step_of_verl_with_several_mini_batches_is_several_optimiser_steps():
    rows = [{"side": "train", "groups": 8}, {"side": "train", "groups": 24}, {"side": "rollout", "groups": 99}]
    told = [f"{compare.MINI_BATCH}4", f"{compare.MINI_BATCH}8"]
    assert compare.updates_of(rows, told, 2) == 4
    assert compare.updates_of([], told, 2) == compare.updates_of(rows, [], 2) == 2


def test_what_the_trainer_took_in_the_later_half():
    def row(tokens, age, seconds, wait, side="train"):
        return {"side": side, "tokens": tokens, "age": age, "seconds": seconds, "spent": {"wait": wait}}

    rows = [row(100, 1.0, 10.0, 1.0), row(300, 3.0, 10.0, 4.0), row(None, None, 5.0, 0.0),
            row(999, None, 25.0, 25.0, "rollout")]
    assert compare.batches_of(rows) == compare.Batches(tokens_per_s=16.0, age=2.5, waited=0.2)
    assert compare.batches_of(rows[-1:]) == compare.Batches(None, None, None)


def test_what_a_prompt_brought_at_its_last_visit_and_at_its_first():
    scored = [("p", "late", 5.0, 1.0), ("p", "late", 5.1, 1.0), ("p", "first", 1.0, 0.0), ("p", "first", 1.1, 1.0),
              ("p", "between", 3.0, 0.0), ("p", "between", 3.1, 0.0), ("q", "once", 2.0, 1.0), ("q", "once", 2.0, 1.0),
              ("r", "1", 1.0, 1.0), ("r", "1", 1.0, 1.0), ("r", "2", 2.0, 1.0), ("r", "2", 2.0, 0.5),
              ("r", "cut short by the end", 9.0, 1.0)]
    rows = [{"prompt": prompt, "group": group, "started": at, "score": score} for prompt, group, at, score in scored]
    rows += [{"group": "of an older release", "started": 0.0}, {**rows[0], "group": "not scored", "score": None}]
    assert compare.visits_of(rows) == compare.Visits(
        prompts=3, came_back=2, learned=(0.5 - 0.25) / 2, error=pytest.approx(0.375))
    assert compare.visits_of([]) == compare.Visits(0, 0, None, None)


def test_arms_are_compared_on_the_prompts_that_both_had():
    def group(prompt, name, at, *scores):
        return [{"prompt": prompt, "group": name, "started": at, "score": score} for score in scores]

    rows = group("q", "1", 2.0, 1.0, 0.0) + group("p", "2", 1.0, 0.0, 0.0) + group("q", "3", 5.0, 1.0, 1.0) \
        + [{"group": "of an older release", "started": 0.0}, *group("r", "4", 0.5, None, None)] \
        + group("s", "5", 6.0, 1.0)  # the end of the run cut it short: its quick member alone is there
    assert compare.first_rewards(rows) == {"p": 0.0, "q": 0.5}  # as they began, first whole groups, scored
    plain = {"a": 1.0, "only plain": 1.0, "b": 0.5, "c": 0.0, "d": 0.25}
    mean, error = compare.on_same_prompts({"a": 0.0, "b": 0.0, "only this": 1.0, "d": 0.75, "c": 0.25}, plain)
    assert mean == pytest.approx((0.25 + 0.5) / 2) and error == pytest.approx(0.125)  # c and d, the later ones of both
    assert compare.on_same_prompts({"a": 1.0, "b": 1.0}, plain) is None and compare.on_same_prompts({}, {}) is None


def test_an_order_of_its_own_is_not_taken_for_a_difference():
    """Two arms that learn alike, one of which takes the prompts as a sampler chooses."""
    names, shuffled = list(range(400)), random.Random(3)
    plain = {prompt: place / 400 for place, prompt in enumerate(names)}
    shuffled.shuffle(names)
    sampled = {prompt: place / 400 for place, prompt in enumerate(names)}
    mean, error = compare.on_same_prompts(sampled, plain)
    assert abs(mean) < 2 * error < 0.05
    late = list(plain)[200:]  # negative control: those that came late in one of them alone
    assert sum(sampled[prompt] - plain[prompt] for prompt in late) / 200 < -0.2


def test_what_came_out_right_and_how_many_of_the_spared_candidates_whether_trained_or_left_out():
    def row(tokens, ended, correct, **more):
        return {"tokens": tokens, "ended": ended, "correct": correct, "trained": True, "candidate": False, **more}

    verdict = {"candidate": True, "candidate_rule": "verdict"}
    rows = [row(10, 1.0, True), row(30, 2.0, True), row(99, 2.0, False), row(50, 3.0, True, exempted=True, **verdict),
            row(70, 4.0, False, exempted=True, **verdict), row(8, 4.0, False, exempted=False, **verdict),
            *({**row(1, 1.0, None, exempted=True, score=score, **verdict), "trained": False}
              for score in (0.0, 1.0, None)),  # left out by the filter, twice; never scored
            row(90, 4.0, False, candidate=True, candidate_rule="resolved", exempted=True)]
    assert compare.right_of(rows, 2.0) == compare.Right((20, 50), (4, 2))
    assert compare.right_of(rows[:3], 2.0) == compare.Right((20, None), None)


def test_the_later_half_of_the_held_out_rewards_is_a_measure(tmp_path):
    write_run(tmp_path / "run", [], [0.2])
    result = compare.load(tmp_path / "run", TARGET)  # of 100 s
    for evaluations, later in (([(0.0, 0.2), (40.0, 0.3), (60.0, 0.5), (90.0, 0.75)], 0.625), ([(0.0, 0.2)], None)):
        found = training.measures(tmp_path / "run", dataclasses.replace(result, evaluations=evaluations))
        assert found["held-out reward, later half"] == later


def test_groups_that_verl_left_out_or_dropped_are_counted_where_its_trainer_says_so(tmp_path):
    write_run(tmp_path / "run", [], [0.2, 0.2, 0.2])
    result, file = compare.load(tmp_path / "run", TARGET), tmp_path / "run" / "metrics-timed.jsonl"
    names = "groups that verl's filter left out", "groups that verl dropped as too old"
    assert [training.measures(tmp_path / "run", result)[name] for name in names] == [None, None]
    rows = [{"training/filter_groups/evicted_samples": count} for count in (16.0, 1.0)]
    rows[0]["training/off_policy/evicted_samples"] = 2.0
    later = "".join(json.dumps({"time": 150.0, "step": 1, "data": row}) + "\n" for row in rows)
    file.write_text(file.read_text() + later)
    assert [training.measures(tmp_path / "run", result)[name] for name in names] == [17.0, 2.0]
