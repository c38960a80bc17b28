"""The simulation of prompt sampling: arms see the same prompts, and choosing finds more gradient than not choosing."""

import json

import pytest

pytest.importorskip("esgrpo.algo.history")


def test_a_small_run_in_every_arm(tmp_path, capsys):
    from bench import prompt_sampling

    path = tmp_path / "result.json"
    assert prompt_sampling.main(["--prompts", "200", "--groups", "1200", "--json", str(path)]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED")
    result = json.loads(path.read_text())
    arms = result["arms"]
    assert result["simulated"] and set(arms) == {"uniform", "greso", "sampler"}
    assert min(arms["sampler"]["gradient"]["seeds"]) > max(arms["uniform"]["gradient"]["seeds"])
    assert arms["uniform"]["distinct"]["mean"] == 1.0 and arms["uniform"]["most_often"]["mean"] == 6
    assert abs(arms["sampler"]["expected"]["mean"] - arms["sampler"]["realised"]["mean"]) < 0.15


def test_the_population_does_not_depend_on_the_rule():
    from bench.prompt_sampling import Population

    first, second = Population(20, 1), Population(20, 1)
    first.step(), second.step()
    assert first.odds == second.odds and Population(20, 2).odds != Population(20, 1).odds
