"""Holds verl's v1 replay buffer to the rules of carry-over, and reports the pool of carried groups."""

from __future__ import annotations

import functools
import json
import os

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="v1-carry-over",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once",
    process=("v1-task-runner",),
    kind="wrap",
    why="the replay buffer says what it evicted, not what it carries over; after a restart nobody compares what came "
        "back with what was unfinished. After this method its snapshot is the one that the batch was taken from",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "11ba0578eccf8235"}),),
    remove_when="verl reports carried groups and checks a restored TransferQueue against the checkpoint",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"),
    without=(("==0.7.0", "no v1 trainers"),),
)

EXCUSES = ("training/rollout_failure/evicted_samples", "training/filter_groups/evicted_samples",
           "training/filter_groups/discarded_surplus_samples")
STATE_FILE = "esgrpo_carry_over.json"
PARTITION = "train"


def build(original):
    @functools.wraps(original)
    def _step_once(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl import v1_carry_over, v1_reissued

        metrics = inspect.signature(original).bind(self, *args, **kwargs).arguments["metrics"]
        pool = v1_carry_over.pool_of(self)
        batch = original(self, *args, **kwargs)
        if pool is not None:
            metrics.update(v1_carry_over.settle(self, pool, batch, metrics))
        metrics.update(v1_reissued.take_metrics(self))
        return batch

    return _step_once


def pool_of(trainer):
    """The pool of this trainer, made on first use; None with a sampler of the user's own, which has its own rules."""
    from esgrpo.algo.carry_over import CarryOver

    if not hasattr(trainer, "esgrpo_carry_over"):
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

        buffer, pool = trainer.replay_buffer, None
        if type(buffer) in (ReplayBuffer, ReplayBufferAsync):
            rules = (buffer.max_off_policy_threshold, buffer.max_off_policy_strategy == "drop")
            state = load(trainer)
            pool = CarryOver(*rules) if state is None else CarryOver.from_state(state, *rules)
        trainer.esgrpo_carry_over = pool
    return trainer.esgrpo_carry_over


def settle(trainer, pool, batch, metrics) -> dict[str, float]:
    """Tell the pool about one sampled batch; a broken rule stops the run."""
    from esgrpo.algo.carry_over import CarryOverError, Waiting
    from esgrpo.errors import EsgrpoError
    from esgrpo.hooks.verl.records import write
    from esgrpo.hooks.verl.v1_rows import final_keys, group_of, real_keys

    buffer, version = trainer.replay_buffer, trainer.global_steps
    born = dict(buffer.prompt_global_steps[PARTITION])
    sizes: dict[str, int] = {}
    for key in final_keys(real_keys(batch)):
        sizes[group_of(key)] = sizes.get(group_of(key), 0) + 1
    complete = buffer.finished_keys[PARTITION] | buffer.failure_keys[PARTITION]
    trained = {group: born.get(group, version) for group in sizes}
    waiting = {group: Waiting(step, group in complete) for group, step in born.items() if group not in sizes}
    excused = int(sum(metrics.get(name, 0) for name in EXCUSES))
    try:
        step = pool.settle(version, trained, waiting, excused)
    except CarryOverError as error:
        raise EsgrpoError("carry-over", str(error), "every group ends exactly once, oldest first",
                          "rewards and staleness could not be trusted, the run stops",
                          "resume from the last checkpoint; report it with esgrpo/carry-*.jsonl") from None
    partial = sum(size != trainer.config.actor_rollout_ref.rollout.n for size in sizes.values())
    write("carry", {"step": version, "groups": trained, "waiting": {g: w.born for g, w in waiting.items()},
                    "partial": partial, **vars(step)})
    return {f"esgrpo/carry/{name}": float(value) for name, value in {**vars(step), "partial": partial}.items()}


def folder(trainer, step: int) -> str:
    return os.path.join(os.path.abspath(trainer.config.trainer.default_local_dir), f"global_step_{step}")


def save(trainer) -> None:
    """Write the pool into the folder of the checkpoint that is being saved, atomically."""
    pool = getattr(trainer, "esgrpo_carry_over", None)
    if pool is None:
        return
    directory = folder(trainer, trainer.global_steps)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, STATE_FILE)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(pool.to_state(), file)
    os.replace(path + ".new", path)


def load(trainer) -> dict | None:
    """The state saved with the checkpoint that this run went on from; None when it started afresh or has none.

    Under `sync` verl saves no TransferQueue: nothing is carried across a restart there, and nothing waits either.
    """
    settings = trainer.config.trainer
    if settings.resume_mode == "disable" or trainer.trainer_mode == "sync":
        return None
    given = settings.resume_from_path if settings.resume_mode == "resume_path" else None
    path = os.path.join(given or folder(trainer, trainer.global_steps - 1), STATE_FILE)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)
