"""Reports the pool of groups that verl's v1 replay buffer carries, and stops a run that trains one of them twice."""

from __future__ import annotations

import os

from esgrpo.engine import Hook
from esgrpo.errors import RunError, say
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

HOOK = Hook(
    slug="v1-carry-over",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once",
    process=("v1-task-runner",),
    kind="wrap",
    why="the replay buffer says what it evicted, not what it carries over; after a restart nobody compares what came "
        "back with what was unfinished. After this method its snapshot is the one that the batch was taken from",
    remove_when="verl reports carried groups and checks a restored TransferQueue against the checkpoint",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"),
    without=(("==0.7.0", "no v1 trainers"),),
)

MEANS = {"gone": "are neither trained nor waiting any more, and verl gave no reason",
         "early": "were trained while older complete groups wait",
         "overdue": "were trained at a greater age than trainer.v1.sampler.max_off_policy_threshold",
         "empty": "ended without a row: verl counts them in the batch and has nothing to train"}
STATE_FILE = "esgrpo_carry_over.json"
TOLD = "told"  # in it: complete groups whose outcomes the prompt history knows


def around(call):
    from esgrpo.hooks.verl.metrics import trained_rows
    from esgrpo.hooks.verl.prompts import in_flight
    from esgrpo.hooks.verl.v1.prompts import drawn_prompts
    from esgrpo.hooks.verl.v1.rows.queue_rows import group_of, real_keys

    trainer = call.owner
    metrics = call.arguments["metrics"]
    pool = pool_of(trainer)
    batch = call()
    groups = {group_of(key) for key in real_keys(batch)}
    trained_rows.begin(sorted(groups), trainer.global_steps)
    drawn_prompts.note_surplus(trainer, groups)
    if pool is not None:
        settle(trainer, pool, batch)
    metrics.update(in_flight.take_metrics(trainer))
    return batch


def pool_of(trainer):
    """The pool of this trainer, made on first use; None with a sampler of the user's own, which has its own rules."""
    from esgrpo.algo.carry_over import CarryOver
    from esgrpo.hooks.verl import owned

    carried = owned.of(trainer, owned.Carried)
    if not carried.known:
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

        buffer, carried.known = trainer.replay_buffer, True
        if type(buffer) in (ReplayBuffer, ReplayBufferAsync):
            rules = (buffer.max_off_policy_threshold, buffer.max_off_policy_strategy == "drop")
            carried.pool = load(trainer, rules) or CarryOver(*rules)
    return carried.pool


def settle(trainer, pool, batch) -> None:
    """Tell the pool about one sampled batch; a group trained twice stops the run, what else is odd is said once."""
    from esgrpo import records
    from esgrpo.algo.carry_over import EMPTY, CarryOverError, Waiting
    from esgrpo.algo.rows import Carry, Evicted
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.v1.prompts.failed_groups import take_evicted
    from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys, group_of, real_keys

    buffer, version = trainer.replay_buffer, trainer.global_steps
    born = dict(buffer.prompt_global_steps[TRAIN])
    sizes: dict[str, int] = {}
    for key in final_keys(real_keys(batch)):
        sizes[group_of(key)] = sizes.get(group_of(key), 0) + 1
    complete = buffer.finished_keys[TRAIN] | buffer.failure_keys[TRAIN]
    with_rows = {group_of(key) for key in buffer.partitions[TRAIN]}
    # verl takes such a group for the batch as if it had rows, or leaves it for a later one: there is nothing to train
    empty = {group: EMPTY for group in complete - with_rows if group in born}
    trained = {group: born.get(group) for group in sizes}
    waiting = {group: Waiting(step, group in complete) for group, step in born.items()
               if group not in sizes and group not in empty}
    new = [group for group in empty if group not in pool.ended]
    try:
        step = pool.settle(version, trained, waiting, {**empty, **take_evicted(buffer)})
    except CarryOverError as error:
        raise RunError("carry-over", str(error), "every group is trained once",
                       "rewards and staleness could not be trusted, the run stops",
                       "report it with esgrpo/carry-*.jsonl") from None
    odd = {kind: groups for kind, groups in {**pool.oddities, EMPTY: new}.items() if groups}
    say_odd(trainer, odd)
    for group in new:
        records.write(Evicted(group=group, reason=EMPTY))
    owned.of(trainer, owned.Drawn).open -= empty.keys()  # they have ended, once
    partial = sum(size != trainer.config.actor_rollout_ref.rollout.n for size in sizes.values())
    records.write(Carry(step=version, groups=trained, waiting={g: w.born for g, w in waiting.items()}, partial=partial,
                        odd=odd, **vars(step)))
    owned.of(trainer, owned.Carried).batches.append({**vars(step), "partial": partial})


def take_metrics(trainer) -> dict[str, float]:
    """Of all batches of the weight version that ends: verl would log the mean of what each of them gave to it."""
    from esgrpo.algo.carry_over import of_version
    from esgrpo.hooks.verl import owned

    carried = owned.of(trainer, owned.Carried)
    batches, carried.batches = carried.batches, []
    return {f"esgrpo/carry/{name}": float(count) for name, count in (of_version(batches) if batches else {}).items()}


def say_odd(trainer, odd: dict[str, list[str]]) -> None:
    """One line the first time that a kind is seen; esgrpo/carry-*.jsonl names every group."""
    from esgrpo.algo.carry_over import IDS_SHOWN
    from esgrpo.hooks.verl import owned

    said = owned.of(trainer, owned.Carried).said
    for kind in sorted(odd.keys() - said):
        said.add(kind)
        groups = odd[kind]
        more = ", ..." if len(groups) > IDS_SHOWN else ""
        say(f"esgrpo: carry-over: {len(groups)} prompt groups ({', '.join(groups[:IDS_SHOWN])}{more}) {MEANS[kind]}; "
            f"the run goes on, esgrpo/carry/{kind} counts them and esgrpo/carry-*.jsonl names each")


def folder(trainer, step: int) -> str:
    return os.path.join(os.path.abspath(trainer.config.trainer.default_local_dir), f"global_step_{step}")


def save(trainer) -> None:
    """Write the pool into the folder of the checkpoint that is being saved, which a slow disk does not hold up long."""
    from esgrpo import records
    from esgrpo.hooks.verl import owned

    pool = owned.of(trainer, owned.Carried).pool
    if pool is None:
        return
    state = {**pool.to_state(), TOLD: sorted(owned.of(trainer.replay_buffer, owned.Groups).observed)}
    records.save(os.path.join(folder(trainer, trainer.global_steps), STATE_FILE), lambda: state)
    records.flush()


def load(trainer, rules):
    """The pool saved with the checkpoint that this run went on from; None when it started afresh or has none that can
    be understood. What the history was told of stays told.

    Under `sync` verl saves no TransferQueue: nothing is carried across a restart there, and nothing waits either.
    """
    from esgrpo.algo.carry_over import CarryOver
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.state_files import restored

    def parse(state):
        pool, told = CarryOver.from_state(state, *rules), state.get(TOLD, [])  # older checkpoints do not say
        if not isinstance(told, list):
            raise ValueError(f"{TOLD}={told!r}")
        owned.of(trainer.replay_buffer, owned.Groups).observed |= frozenset(map(str, told))
        return pool

    settings = trainer.config.trainer
    if settings.resume_mode == "disable" or trainer.trainer_mode == "sync":
        return None
    given = settings.resume_from_path if settings.resume_mode == "resume_path" else None
    path = os.path.join(given or folder(trainer, trainer.global_steps - 1), STATE_FILE)
    return restored("carry-over", path, parse)
