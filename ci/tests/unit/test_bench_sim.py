"""Workloads and the simulator's command line. Toy sizes, no times."""

import json
import statistics

import pytest

from bench import workload
from bench.policies import policies, policy
from bench.sim.__main__ import main
from bench.sim.device import Device
from bench.workload import generate, replay

TOY = ["--replicas", "2", "--groups", "4", "--members", "4", "--cap", "128", "--scale", "0.02", "--updates", "2",
       "--sequences", "8"]
CLOCKS = ("time", "date", "host", "elapsed", "wall")


def test_a_workload_is_what_its_source_says():
    found = workload.statistics(generate("math", 3000, 8, 16384, 7))
    assert 1000 < found["p50"] < 1300 and 3.2 < found["p90"] / found["p50"] < 4.4 and found["max"] == 16384
    assert 0.02 < found["at_longest"] < 0.05 and 0.25 < found["one_mind"] < 0.5


def test_long_and_hard_go_together_and_prompts_come_back():
    groups = generate("math", 2000, 8, 16384, 7, prompts=500)
    assert sorted({group.prompt for group in groups[:500]}) == list(range(500))
    assert [group.prompt for group in groups[:500]] != [group.prompt for group in groups[500:1000]]
    samples = [sample for group in groups for sample in group.samples]
    right, wrong = ([s.tokens for s in samples if s.correct is verdict] for verdict in (True, False))
    assert statistics.median(right) < 0.8 * statistics.median(wrong)
    assert not any(sample.correct for sample in samples if sample.tokens == 16384)


def test_spare_samples_leave_the_others_alone():
    few, many = (generate("code", 40, 4, 4096, 3, spare=spare) for spare in (0, 5))
    assert [[(s.tokens, s.correct) for s in group.samples] for group in few] == [
        [(s.tokens, s.correct) for s in group.samples[:4]] for group in many]
    assert len({sample.key for group in many for sample in group.samples}) == 40 * 9


def test_a_trace_is_replayed(tmp_path):
    rows = [{"prompt": prompt, "tokens": 10 * number + 1, "correct": True}
            for number in range(3) for prompt in ("a", ["b"])]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    groups = replay(path, 2, cap=5)
    assert [(group.prompt, [(s.tokens, s.correct) for s in group.samples]) for group in groups] == [
        (0, [(1, True), (5, False)]), (1, [(1, True), (5, False)])]


def test_the_default_device_is_full_at_its_knee():
    device = Device.load()
    assert 64 < device.capacity(512) <= 128
    assert (device.step(1), device.step(96), device.step(1024)) == pytest.approx((0.00274, 0.005415, 0.0443))
    with pytest.raises(ValueError, match="ms_per_step"):
        Device.from_record({"device": "x", "ms_per_step": {"0": 1.0}})


@pytest.mark.parametrize("scenario", ["sync", "async"])
def test_the_command_is_deterministic_and_says_that_it_is_simulated(scenario, capsys):
    names = ",".join(name for name, cls in policies().items() if scenario in cls.scenarios)
    answers = []
    for _ in range(2):
        assert main([*TOY, "--scenario", scenario, "--policy", names, "--json"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    result = json.loads(answers[0])
    assert result["simulated"] and result["device"].startswith("simulated") and len(result["policies"]) >= 5
    assert not [key for key in result if any(clock in key for clock in CLOCKS)]
    for found in result["policies"].values():
        assert found["decoded"] == found["trained"] + sum(found["waste"].values())


def test_a_table_for_people_and_names_that_do_not_exist(capsys):
    assert main([*TOY, "--policy", "verl,es-grpo/AB+no-tail"]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED")
    for name in ("none", "es-grpo/X", "es-grpo/A+none"):
        with pytest.raises(KeyError):
            policy(name)
