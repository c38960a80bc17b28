"""Collects the hook states of every process of a run, writes them down, and stops a run that lacks one.

Pull, not push: the task runner asks each actor to run a function of this package. A worker without the overlay
cannot even import it, so a lost PYTHONPATH is an answer, too.
"""

from __future__ import annotations

import os
from collections import Counter

from esgrpo import engine
from esgrpo.errors import HookError, say
from esgrpo.hooks.verl.server import calls_with_deadline

REPORTERS = ("engine-core-utilities", "server-control", "partial-server-control")  # what an EngineCore reports through


def of_actor(instance, process: str) -> dict:
    """Runs inside an actor; with the name and the address by which Ray's errors speak of it."""
    import ray

    return {**engine.report(process, instance), "ip": ray.util.get_node_ip_address(),
            "actor": ray.get_runtime_context().get_actor_name() or ""}


def actor_names() -> dict[tuple[str, str], str]:
    """(node address, pid) -> Ray's name of the actor, from the handshake of this run; empty when it is not readable."""
    import json

    from esgrpo import records

    path = os.path.join(os.environ.get("ESGRPO_RUN_DIR", "."), records.FOLDER, records.HOOKS)
    try:
        with open(path, encoding="utf-8") as file:
            return {(row["ip"], str(row["pid"])): row["actor"] for row in json.load(file) if row.get("actor")}
    except (OSError, ValueError):
        return {}


def of_group_workers(instance, group: str) -> list:
    """Runs inside the trainer: handles of a worker group's workers."""
    return list(getattr(instance, group).workers)


def of_rollouter(instance) -> dict:
    """Runs inside the rollouter: handles of everything it created."""
    manager = instance.async_rollout_manager
    if not hasattr(instance, "llm_server_manager"):  # verl 0.7.0: one manager for servers and agent loops
        return {
            "vllm-server": [server for replica in manager.rollout_replicas for server in replica.servers],
            "rollout-worker": [worker for replica in manager.rollout_replicas for worker in replica.workers],
            "agent-loop-worker": list(manager.agent_loop_workers),
        }
    replicas = instance.llm_server_manager.get_replicas()
    return {
        "vllm-server": [server for replica in replicas for server in replica.servers],
        "rollout-worker": [worker for replica in replicas for worker in replica.workers],
        "agent-loop-worker": list(manager.agent_loop_workers),
        "reward-loop-worker": list(instance.reward_loop_manager.reward_loop_workers),
    }


def of_v1(trainer) -> dict[str, list]:
    """Handles of everything that a v1 trainer has created; the agent loop workers are its task runner's."""
    replicas = [replica for manager in trainer._rollout_server_managers() for replica in manager.get_replicas()]
    actors = list(trainer.actor_rollout_wg.workers)
    shared = {actor._actor_id for actor in actors}  # hybrid replicas run in the actor workers
    return {
        "vllm-server": [server for replica in replicas for server in replica.servers],
        "rollout-worker": [worker for replica in replicas for worker in replica.workers
                           if worker._actor_id not in shared],
        "reward-loop-worker": list(trainer.get_reward_handles() or ()),
        "actor-worker": actors,
    }


def _ask(handles: dict[str, list]) -> list[dict]:
    import ray

    pending = [(process, handle.__ray_call__.remote(of_actor, process))
               for process, actors in handles.items() for handle in actors]
    pending += [("engine-core", server.esgrpo_engine_reports.remote()) for server in handles.get("vllm-server", ())
                if hasattr(server, "esgrpo_engine_reports")]
    reports = []
    for process, reference in pending:
        try:
            answer = ray.get(reference, timeout=calls_with_deadline.ANSWER_DEADLINE_S)
        except Exception as error:
            problem = HookError("handshake", f"a {process} cannot answer: {type(error).__name__}: "
                            + str(error).strip().splitlines()[-1], "its hook states",
                            "the overlay is not loaded there, the run stops before the first weight sync",
                            "make esgrpo importable in every worker (pip install it, or check PYTHONPATH in "
                            "runtime_env)")
            if engine.strict():
                raise problem from None
            say(problem)
            continue
        reports.extend(answer if isinstance(answer, list) else [answer])
    return reports


def _handles(process: str, reference):
    """What one of the two answers that know all others."""
    import ray

    try:
        return ray.get(reference, timeout=calls_with_deadline.ANSWER_DEADLINE_S)
    except ray.exceptions.GetTimeoutError:
        raise HookError("handshake", f"no answer of the {process} within {calls_with_deadline.ANSWER_DEADLINE_S:.0f} s",
                        "handles of the workers that it created", "nothing would confirm their hooks, the run stops",
                        f"look for the {process} in the log above") from None


def collect_and_check(task_runner) -> list[dict]:
    rollouter, trainer = task_runner.components["rollouter"], task_runner.components["trainer"]
    handles = {"rollouter": [rollouter], "trainer": [trainer]}
    handles.update(_handles("rollouter", rollouter.__ray_call__.remote(of_rollouter)))
    handles["actor-worker"] = _handles("trainer", trainer.__ray_call__.remote(of_group_workers, "actor_wg"))
    reports = [engine.report("task-runner", task_runner), *_ask(handles)]
    _write(reports)
    _check(reports)
    return reports


def collect_and_check_v1(task_runner) -> list[dict]:
    """The same for verl's v1 trainers, which run inside the task runner."""
    handles = {**of_v1(task_runner.trainer),
               "agent-loop-worker": list(task_runner.agent_loop_manager.agent_loop_workers)}
    reports = [engine.report("v1-task-runner", task_runner), *_ask(handles)]
    _write(reports)
    _check(reports)
    return reports


def check_v1_trainer(trainer) -> list[dict]:
    """What exists before the first weight sync; the process of the trainer answers for itself later."""
    reports = [{**engine.report("v1-task-runner"), "hooks": []}, *_ask(of_v1(trainer))]
    _write(reports)
    _check(reports)
    return reports


def flush_records(task_runner) -> None:
    """At the end of a run its actors are killed: their last rows first. A dead or silent actor has none to give."""
    import ray

    from esgrpo import records

    pending = [task_runner.components[name].__ray_call__.remote(_flush) for name in ("rollouter", "trainer")]
    ray.wait(pending, num_returns=len(pending), timeout=records.WAIT_S + records.EXIT_S)


def _flush(instance) -> None:
    """Runs inside an actor that has nothing else to do any more."""
    from esgrpo import records
    from esgrpo.hooks.verl.metrics import decision_counts

    decision_counts.finish()
    records.flush()


def _write(reports: list[dict]) -> None:
    from esgrpo import records

    path = os.path.join(os.environ.get("ESGRPO_RUN_DIR", "."), records.FOLDER, records.HOOKS)
    records.save(path, lambda: reports, indent=1)
    records.flush()  # a refusal ends this process


def _check(reports: list[dict]) -> None:
    counts = Counter(row["state"] for report in reports for row in report["hooks"])
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    say(f"esgrpo: handshake: {len(reports)} processes, {summary}")
    error = find_problem(reports)
    if error is not None and engine.strict():
        raise error
    if error is not None:
        say(error)


def find_problem(reports: list[dict]) -> HookError | None:
    """The first reason not to start, or None. The first report is the task runner's own: the others must agree."""
    ours = reports[0]
    for report in reports:
        where = f"{report['process']} {report['host']}:{report['pid']}"
        if (report["segment"], report["overlay_version"]) != (ours["segment"], ours["overlay_version"]):
            return HookError("handshake", f"{where} runs esgrpo {report['overlay_version']} with "
                             f"segment {report['segment'] or 'unset'}",
                             f"esgrpo {ours['overlay_version']} with segment {ours['segment'] or 'unset'}",
                             "processes would decide differently, the run stops before the first weight sync",
                             "install the same esgrpo on every node and let runtime_env pass ESGRPO_*")
    missing = [(report, row) for report in reports for row in engine.not_in_place(report["hooks"])]
    if missing:
        report, row = missing[0]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return HookError(row["slug"], f"{row['state']} in {report['process']} {report['host']}:{report['pid']}: "
                         f"{row['detail']}{more}", "APPLIED", "strict mode stops here, before the first weight sync",
                         f"esgrpo status {os.environ.get('ESGRPO_RUN_DIR', '.')} lists all; "
                         f"ESGRPO_DISABLE={row['slug']} or ESGRPO_STRICT=0 goes on")
    servers, cores = (sum(r["process"] == kind for r in reports) for kind in ("vllm-server", "engine-core"))
    if cores < servers and not {"*", *REPORTERS}.intersection(ours.get("disabled", ())):
        return HookError("engine-core-utilities", f"{cores} EngineCore reports", f"one per server, {servers}",
                         "the scheduler hook cannot be confirmed", "see the states of the vllm-server processes")
    return None
