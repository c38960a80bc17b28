"""The comparison of arms: when a target counts as reached, and what is said where it does not."""

import json
from types import SimpleNamespace

import pytest

from bench.common import compare
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
