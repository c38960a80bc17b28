"""The driver's verdict on the reports of all processes."""

from __future__ import annotations

import copy

from esgrpo.hooks.verl.run.reports import find_problem, of_rollouter


def row(slug: str, state: str, needed: bool = True) -> dict:
    return {"slug": slug, "state": state, "detail": "why", "needed": needed}


def report(process: str, pid: int, *rows: dict, segment: str = "{}", version: str = "1") -> dict:
    return {"process": process, "host": "node", "pid": pid, "segment": segment, "overlay_version": version,
            "hooks": list(rows)}


GOOD = [report("task-runner", 1, row("a", "APPLIED")), report("vllm-server", 2, row("a", "NOT_NEEDED")),
        report("engine-core", 3, row("a", "APPLIED"), row("b", "DISABLED"), row("c", "PENDING", needed=False))]


def test_all_in_place():
    assert find_problem(GOOD) is None


def test_each_bad_state_stops_the_run_and_names_the_process():
    for state in ("PENDING", "INCOMPATIBLE", "DRIFTED", "LATE", "FAILED"):
        reports = copy.deepcopy(GOOD)
        reports[2]["hooks"][0]["state"] = state
        problem = str(find_problem(reports))
        assert f"esgrpo: a: {state} in engine-core node:3" in problem and problem.count("\n") == 0


def test_a_process_with_other_settings_or_another_release_is_refused():
    for change in ({"segment": '{"enable": true}'}, {"overlay_version": "2"}):
        reports = copy.deepcopy(GOOD)
        reports[1].update(change)
        assert "vllm-server node:2 runs esgrpo" in str(find_problem(reports))


def test_a_server_without_an_engine_core_report_is_refused():
    assert "0 EngineCore reports" in str(find_problem(GOOD[:2]))


def test_the_rollouter_of_0_7_0_names_what_it_created():
    """One manager has both the servers and the agent loops there, and no reward loop has actors of its own."""
    from types import SimpleNamespace

    replicas = [SimpleNamespace(servers=["s0"], workers=["w0", "w1"]), SimpleNamespace(servers=["s1"], workers=["w2"])]
    manager = SimpleNamespace(rollout_replicas=replicas, agent_loop_workers=["a0"])
    assert of_rollouter(SimpleNamespace(async_rollout_manager=manager)) == {
        "vllm-server": ["s0", "s1"], "rollout-worker": ["w0", "w1", "w2"], "agent-loop-worker": ["a0"]}
