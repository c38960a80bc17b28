"""The simulation of prompt sampling: arms see the same prompts, and choosing finds more gradient than not choosing."""

import json

import pytest

pytest.importorskip("esgrpo.algo.history")


def test_a_small_run_in_every_arm(tmp_path, capsys):
    from bench import prompt_sampling

    path = tmp_path / "result.json"
    assert prompt_sampling.main(["--prompts", "200", "--groups", "1200", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("SIMULATED")
    result = json.loads(path.read_text())
    assert result["simulated"] and set(result["populations"]) == set(prompt_sampling.POPULATIONS)
    for arms in result["populations"].values():
        assert set(arms) == {"uniform", "greso", "thompson", "sampler"}
        assert min(arms["sampler"]["gradient"]["seeds"]) > max(arms["uniform"]["gradient"]["seeds"])
        assert arms["uniform"]["distinct"]["mean"] == 1.0 and arms["uniform"]["most_often"]["mean"] == 6
    assert result["beats_greso"]["mixed"].keys() == {"gradient", "gain"} and "sampler beats greso" in said
    recoveries = result["recovery_share"]["tried"]  # a longer one repeats less
    assert recoveries["1.5"]["most_often"]["mean"] < recoveries["0.25"]["most_often"]["mean"]
    mixed = result["populations"]["mixed"]["sampler"]
    assert abs(mixed["expected"]["mean"] - mixed["realised"]["mean"]) < 0.1


def test_the_comparison_is_not_made_with_the_seeds_of_the_tuning(capsys):
    from bench import prompt_sampling

    with pytest.raises(SystemExit):
        prompt_sampling.main(["--seeds", "0,1", "--tuning-seeds", "1,2"])
    assert "tuned" in capsys.readouterr().err


def test_a_rule_beats_another_in_every_seed_or_does_not():
    from bench.prompt_sampling import verdict

    arms = {"sampler": {"gradient": {"seeds": [0.5, 0.7]}, "gain": {"seeds": [0.2, 0.2]}},
            "greso": {"gradient": {"seeds": [0.4, 0.8]}, "gain": {"seeds": [0.1, 0.1]}}}
    assert verdict(arms) == {"gradient": "not in every seed", "gain": "yes"}
    assert verdict(arms, "greso", "sampler")["gain"] == "no"


def test_the_population_does_not_depend_on_the_rule():
    from bench.prompt_sampling import Population

    first, second = Population(20, 1), Population(20, 1)
    first.step(), second.step()
    assert first.odds == second.odds and Population(20, 2).odds != Population(20, 1).odds
