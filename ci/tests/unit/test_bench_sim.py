"""Workloads and the simulator's command line. Toy sizes, no times."""

import itertools
import json
import statistics

import pytest

from bench.common import workload
from bench.common.workload import generate, replay
from bench.policies import policies, policy
from bench.sim import study, validate
from bench.sim.__main__ import main
from bench.sim.device import DEFAULT, Device, read_tau
from bench.sim.validate import SAME
from esgrpo.errors import EsgrpoError

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
    assert main([*TOY, "--policy", "verl,es-grpo/AB+tails+bound-1,april/1.5"]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED")
    for name in ("none", "es-grpo/X", "es-grpo/A+none", "april/0.5", "april/x", "verl/2"):
        with pytest.raises(KeyError):
            policy(name)
    for arguments, said in ((["--policy", "verl,none"], "unknown policy 'none'"),
                            (["--policy", "tailsieve", "--scenario", "async"], "has no async scenario")):
        with pytest.raises(SystemExit):
            main([*TOY, *arguments])
        assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("scenario", ["sync", "async"])
def test_the_prompt_sampler_chooses_other_prompts_with_more_gradient(scenario):
    from bench.sim.experiment import Setting, run

    setting = Setting(replicas=2, groups=16, members=8, cap=256, scale=0.1, updates=6, scenario=scenario)
    with_it, without = (run(setting, f"es-grpo/AB{module}", Device.load()) for module in ("S", ""))
    assert with_it["trained_groups"] == without["trained_groups"] == 96
    assert with_it["gradient_groups"] > 1.15 * without["gradient_groups"]


def test_a_recorded_trace_leaves_nothing_to_choose(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"prompt": i // 4, "tokens": 9, "correct": True}) + "\n" for i in range(64)))
    with pytest.raises(SystemExit):
        main([*TOY, "--replay", str(trace), "--policy", "es-grpo/S"])
    assert "a recorded trace has its own" in capsys.readouterr().err


def record(tmp_path, slow: float):
    """An engine's file whose runs are the simulator's own, and whose device is `slow` times as slow as it was."""
    from bench.sim.experiment import Setting, run

    tau = json.loads(DEFAULT.read_text())
    rows = []
    for name in ("verl", "es-grpo"):
        setting = Setting(replicas=2, groups=4, members=4, cap=256, scale=0.1, updates=2, scenario="async")
        found = run(setting, name, Device.load())
        rows.append({"kind": "run", **{key: getattr(setting, key) for key in SAME}, "policy": name, "workload": "math",
                     "max_num_seqs": 256, "makespan_s": found["makespan_s"], "decoded": found["decoded"],
                     "versions_old": found["staleness"]})
    tau["ms_per_step"] = {b: slow * ms for b, ms in tau["ms_per_step"].items()}
    path = tmp_path / f"runs-{slow}.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"kind": "tau", **tau}, *rows])))
    return path


def test_a_run_is_predicted_from_its_record_and_a_wrong_device_is_not(tmp_path, capsys):
    out = tmp_path / "validation.json"
    assert validate.main([str(record(tmp_path, 1.0)), "--out", str(out)]) == 0
    right = json.loads(out.read_text())
    assert right["simulated"] and right["verdict"]["max_error"] < 1e-6 and right["verdict"]["within_10_percent"] == 2
    assert all(row["decoded_measured"] == row["decoded_predicted"] for row in right["runs"])
    assert validate.main([str(record(tmp_path, 2.0)), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["verdict"]["within_10_percent"] == 0
    (tmp_path / "empty").write_text("{}")
    with pytest.raises(EsgrpoError, match="no runs"):
        validate.main([str(tmp_path / "empty")])
    capsys.readouterr()


def test_replicas_of_one_device_slow_each_other_down():
    """Points of one replica alone and of both, as bench.engine.tau takes them."""
    from bench.sim.experiment import Setting, run

    points = [{"batch": b, "replicas": count, "kv_tokens": 100, "ms_per_step": 1.0 * count}
              for b in (1, 8) for count in (1, 2)]
    tau = read_tau({"tau": {"device": "shared", "ms_per_step": {"1": 2.0, "8": 2.0}, "prefill_tokens_per_s": 1e6,
                            "kv_tokens": 10**6, "weight_sync_s": 0.0}, "points": points})
    device = Device.from_record(tau, devices=1)
    assert (device.step(4), device.step(4, 0.0), device.step(4, 0.5)) == (0.002, 0.001, 0.0015)
    setting = Setting(replicas=2, groups=1, members=2, cap=256, scale=0.1, updates=1)
    lengths = sorted(sample.tokens for sample in list(itertools.islice(setting.groups_of(0), 2))[1].samples)
    found = run(setting, "verl", device)["makespan_s"]
    assert found == pytest.approx(0.002 * lengths[0] + 0.001 * (lengths[1] - lengths[0]), abs=1e-3)
    assert run(setting, "verl", Device.from_record(tau, devices=2))["makespan_s"] < found


def test_the_study_runs(tmp_path, capsys):
    out = tmp_path / "study.json"
    assert study.main(["--small", "--seeds", "1,2", "--parts", "policies", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert capsys.readouterr().out.startswith("SIMULATED") and found["simulated"] and found["seeds"] == [1, 2]
    assert all(row["updates"]["low"] <= row["updates"]["mean"] <= row["updates"]["high"]
               for rows in found["policies"].values() for row in rows)
    for scenario, base in (("sync", "colocate_async"), ("async", "verl")):  # verl's best: its own carry-over
        rows = {row["policy"]: row for row in found["policies"][scenario]}
        assert rows[base]["updates"]["mean"] == 1.0 and {row["against"] for row in rows.values()} == {base}
        assert rows["es-grpo"]["staleness"]["rows"]["share"] >= 0 and "keep" in rows["es-grpo"]["decisions"]
    assert any(row["policy"] == "tailsieve" and row["note"] for row in found["policies"]["sync"])


def test_a_device_measured_several_times_is_their_median():
    taus = [{"device": "x", "ms_per_step": {"1": ms, "2": 9.0}, "prefill_tokens_per_s": ms} for ms in (1.0, 5.0, 2.0)]
    assert validate.median_of(taus)["ms_per_step"] == {"1": 2.0, "2": 9.0}
    assert validate.median_of(taus)["prefill_tokens_per_s"] == 2.0 and validate.median_of([]) is None


def test_a_device_measured_at_one_context_takes_the_price_of_a_longer_one_from_elsewhere():
    own = {"device": "x", "ms_per_step": {"1": 2.0, "64": 5.0}, "ns_per_kv_token": 0.0,
           "points": [{"batch": 1, "kv_tokens": 1000}, {"batch": 64, "kv_tokens": 1000}]}
    at_length = {"device": "x", "ms_per_step": {"1": 9.0}, "ns_per_kv_token": 10.0}

    def step_ms(tau, batch, tokens):
        return tau["ms_per_step"][str(batch)] + 1e-6 * tau["ns_per_kv_token"] * batch * tokens

    found = validate.with_context(own, at_length)
    assert [step_ms(found, batch, 1000) for batch in (1, 64)] == pytest.approx([2.0, 5.0])  # where it was measured
    assert step_ms(found, 64, 3000) == pytest.approx(5.0 + 10e-6 * 64 * 2000)
    assert validate.with_context(own, None) is own
    measured = {**own, "ns_per_kv_token": 3.0}
    assert validate.with_context(measured, at_length) is measured  # it knows better
