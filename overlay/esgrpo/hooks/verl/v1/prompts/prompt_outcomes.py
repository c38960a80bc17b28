"""Every finished group of verl's v1 trainers reaches the prompt history, also one that is never trained."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import AFTER_UID, TRAIN

_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

HOOK = Hook(
    slug="v1-prompt-outcomes",
    target=f"{_BUFFER}._sync_metadata_from_transfer_queue",
    process=("v1-task-runner",),
    kind="wrap",
    why="the trainer's own steps see only groups that are trained: those without variance, which a prompt sampler "
        "must learn to avoid, are evicted in the replay buffer, as are stale ones; each of its polls starts here",
    remove_when="verl calls a function per finished group in the trainer",
    features=("history",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer", f"{_BUFFER}._dapo_filtered_keys",
               f"{_BUFFER}._clear_groups", f"{_BUFFER}.__init__",
               "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess"),
    without=(("<0.9", "these releases have no v1 trainers"),),
)

FIELDS = ("raw_prompt", "extra_fields")
REWARD = "rm_scores"


def around(call):
    buffer = call.owner
    result = call()
    trainer = getattr(buffer.refill_fn, "__self__", None)  # verl hands the buffer a method of its trainer
    if trainer is not None:
        observe_finished(buffer, trainer)
    return result


def observe_finished(buffer, trainer) -> None:
    """Groups that finished since the last poll; each is observed once. Failed groups say nothing."""
    from esgrpo.hooks.verl import owned

    groups = owned.of(buffer, owned.Groups)
    finished = set(buffer.finished_keys[TRAIN])
    new = finished - groups.observed
    groups.observed = frozenset(finished)  # a group leaves the queue for good: no more is to be remembered
    if new:
        keys = last_outputs(buffer.partitions[TRAIN], new)
        for prompt, rows in _groups(buffer, trainer, keys):
            from esgrpo.hooks.verl.prompts.prompt_rows import observe

            observe(trainer, prompt, rows, trainer.global_steps)


def last_outputs(partition: dict, uids: set[str]) -> dict[str, list[str]]:
    """Keys uid_session_index of the last output of every session, by uid: a multi-turn session may have several."""
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for key in partition:
        uid, session, index = key.rsplit("_", AFTER_UID)
        if uid in uids:
            last[uid, session] = max(last.get((uid, session), (-1, "")), (int(index), key))
    groups: dict[str, list[str]] = {}
    for (uid, _), (_, key) in last.items():
        groups.setdefault(uid, []).append(key)
    return groups


def _groups(buffer, trainer, keys: dict[str, list[str]]):
    """(raw prompt, rows) per group; one request for all of them."""
    from verl.trainer.ppo.v1 import replay_buffer

    wanted = [key for group in keys.values() for key in group]
    if not wanted:
        return
    rewarded = trainer.reward_loop_manager.reward_loop_worker_handles is not None  # else rewards come after sampling
    names = [*FIELDS, REWARD] if rewarded else list(FIELDS)
    # no deadline of ours (queue_rows): this is one of the polls that it speaks of
    data = replay_buffer.tq.kv_batch_get(keys=wanted, partition_id=TRAIN, select_fields=names)
    columns = {name: [getattr(value, "data", value) if name in FIELDS else value for value in data[name]]
               for name in names}
    at = dict(zip(wanted, range(len(wanted)), strict=True))
    for group in keys.values():
        rows = []
        for key in group:
            extra = columns["extra_fields"][at[key]] or {}
            score = float(columns[REWARD][at[key]].sum()) if rewarded else None
            rows.append({"tokens": buffer.partitions[TRAIN][key]["response_len"], "score": score,
                         "acc": (extra.get("reward_extra_info") or {}).get("acc"), "summary": extra.get("esgrpo")})
        yield columns["raw_prompt"][at[group[0]]], rows
