"""Group rules in an agent-loop worker: tells the pruner of endings, asks replicas for progress, carries verdicts out.

Called by `group_members`. Nothing happens without audited rules, and nothing where rewards are not computed in the
agent loop: no rule can judge a group without them.
"""

from __future__ import annotations

import os
import sys
import zlib


def pruner_of(worker):
    """The GroupPruner of this worker process, made on first use; None when no rule needs one.

    One worker, one audit: its window sees only the groups of this worker, so W workers need W times as many outcomes
    before all of them prune, and their scales may differ. Weights stay exact, each row knows its own probability.
    What it has learned is kept across restarts, worker by worker: the one with the same index goes on from it.
    """
    from esgrpo import config

    if not hasattr(worker, "esgrpo_pruner"):
        settings = config.current()
        worker.esgrpo_pruner = _make(worker, settings) if settings.audited else None
    return worker.esgrpo_pruner


def _make(worker, settings):
    import random

    from esgrpo.algo.audit import Audit
    from esgrpo.algo.group_pruning import GroupPruner
    from esgrpo.hooks.verl import state_files

    audit = Audit(settings.prune.audit, random.Random(f"{settings.seed}-{_index(worker)}"))
    pruner = GroupPruner(settings, audit, worker.rollout_config.response_length)
    state_files.restored("prune-audit", _file(worker), pruner.restore)
    return pruner


def _file(worker) -> str | None:
    """Beside the prompt history, one per worker; None without a run directory, then nothing is kept."""
    from esgrpo.hooks.verl import prompt_history

    history = prompt_history.path()
    return history and f"{os.path.splitext(history)[0]}-audit-{_index(worker)}.json"


def save(worker) -> None:
    """Have what the audit has learned since the last call written."""
    from esgrpo import records

    pruner = pruner_of(worker)
    if pruner is None:
        return
    file, state = _file(worker), pruner.to_state()
    if file is None or state == getattr(worker, "esgrpo_audit_saved", None):
        return
    worker.esgrpo_audit_saved = state
    records.save(file, lambda: state)


def _index(worker) -> int:
    """A number that differs from worker to worker and is the same in the next run.

    verl names its workers agent_loop_worker_<index>_<uuid>; a worker without that name is told apart by its name.
    """
    ray = sys.modules.get("ray")
    name = ray.get_runtime_context().get_actor_name() if ray is not None and ray.is_initialized() else ""
    numbers = [part for part in (name or "").split("_") if part.isdecimal()]
    return int(numbers[0]) if numbers else zlib.crc32((name or "").encode())


def watch(worker, member, size: int) -> None:
    pruner = pruner_of(worker)
    if pruner is not None:
        pruner.watch(member.group, size, member.forecast)


def ended(worker, member, output) -> None:
    """A member has left; `output` is what it ended with, None when it failed and under v1 (score and acc in member)."""
    pruner = pruner_of(worker)
    if pruner is None:
        return
    by_rule = member.outcome == "prune" and not member.doomed
    pruner.ended(member.group, member.number, _finished(worker, member, output), by_rule)
    if member.group not in worker.esgrpo_coordinator.groups:
        pruner.close(member.group)


def _finished(worker, member, output):
    from esgrpo import config
    from esgrpo.algo.group_pruning import Finished
    from esgrpo.algo.pruning import is_correct

    score, acc = (member.score, member.acc) if output is None else reward_of(output)
    if score is None:
        return None
    correct = is_correct(score, acc, config.current().success_threshold)
    capped = member.tokens >= worker.rollout_config.response_length
    return Finished(member.tokens, correct, float(score), capped)


def reward_of(output) -> tuple:
    """(score, acc or None) of an AgentLoopOutput. verl's `dapo` reward manager leaves a tensor as the score of an
    overlong response; a record and a pruner want a float."""
    score = output.reward_score
    return None if score is None else float(score), (output.extra_fields.get("reward_extra_info") or {}).get("acc")


async def checkpoint(worker, group: str) -> None:
    """A member of the group has just ended: who of the others is a candidate, and what does the coin say?"""
    pruner = pruner_of(worker)
    if pruner is None or not pruner.wants_progress(group):
        return
    from esgrpo.hooks.verl import group_members

    servers = await group_members.servers_of(worker)
    running = await progress(servers, group)
    # verdicts are taken at once, on what is true after the answers: others may have ended while we waited
    members = {number: worker.esgrpo_members.get((group, number)) for number in running}
    running = {number: running[number] for number, member in members.items() if member and not member.sealed}
    doomed: dict[str, list[int]] = {}
    for number, decided in pruner.checkpoint(group, running).items():
        members[number].decision = _plain(decided)
        if decided.verdict.prune:
            doomed.setdefault(decided.verdict.rule, []).append(number)
    for rule, numbers in doomed.items():
        await group_members.finish_members(group, numbers, rule, servers)


def _plain(decided) -> dict:
    verdict = decided.verdict
    return {"rule": verdict.rule, "prune": verdict.prune, "keep_probability": decided.keep_probability,
            "reason": verdict.reason, "tokens": decided.tokens, "pivot": decided.pivot}


def judge_loop(worker, member) -> None:
    """An engine has handed a proven loop back, for the coin: it is doomed, or goes on and is looked at no more."""
    decided = pruner_of(worker).loop(member.group, member.number, member.tokens, member.surprisal)
    if decided is not None:
        member.decision = _plain(decided)
    member.exempt = not member.doomed


async def progress(servers, group: str) -> dict[int, int]:
    """Tokens of the whole response so far, of every member that decodes on one of the replicas."""
    from esgrpo.hooks.verl.server_calls import answers_if_any
    from esgrpo.hooks.verl.server_control import methods

    answers = await answers_if_any([call.remote(group) for call in methods(servers, "esgrpo_progress")], "progress",
                                   "nothing is pruned at this checkpoint")
    return {int(number): tokens for answer in answers for number, tokens in answer.items()}


def report(worker, member) -> dict:
    """What the audit knows of a candidate's rule now, for its summary; it travels with the row to the trainer."""
    pruner = pruner_of(worker)
    if pruner is None or member.decision is None:
        return {}
    return {"audit": pruner.audit.report(member.decision["rule"])}
