"""A step of v1's separate_async begins another prompt for each finished group that verl's filter will leave out, before
the trainer asks for its batch and not after."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

HOOK = Hook(
    slug="v1-refill-ahead",
    target=f"{_BASE}._next_train_batch",
    process=("v1-task-runner",),
    kind="wrap",
    why="verl's group filter evicts and refills while a batch is asked for: what it leaves out is made again while the "
        "trainer waits, and of the batches that num_warmup_batches puts in process some will never be trained",
    remove_when="verl's group filter refills as groups end, or its warm-up counts groups that pass",
    features=("null_groups",),
    after=("v1-drawn-prompts",),
    relies_on=(f"{_BASE}._add_batch_to_generate", f"{_BASE}._add_prompts_to_generate",
               f"{_BUFFER}._dapo_filtered_keys", f"{_BUFFER}._sync_metadata_from_transfer_queue",
               f"{_BUFFER}Async._stale_terminal_keys"),
    without=(("<0.9.1", "seen under verl 0.9.1 alone"),),
)


def around(call):
    trainer = call.owner
    if call.arguments.get("num_prompts") is not None or not counts(trainer):
        return call()
    return call(num_prompts=of_step(trainer))


def counts(trainer) -> bool:
    """Whether this hook says what a step begins. A replay buffer of the user's own has its own rules."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from esgrpo import engine
    from esgrpo.algo.decisions import SEPARATE
    from esgrpo.algo.terms import Feature

    return (trainer.trainer_mode == SEPARATE and type(trainer.replay_buffer) is ReplayBufferAsync
            and Feature.NULL_GROUPS in engine.active_features() and not engine.out_of_action(HOOK.slug))


def of_step(trainer) -> int:
    """Prompts that this step begins."""
    from esgrpo import engine
    from esgrpo.algo import null_groups
    from esgrpo.algo.terms import Feature
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts

    buffer, ahead, batch = trainer.replay_buffer, owned.of(trainer, owned.Ahead), trainer.config.data.train_batch_size
    groups = owned.of(buffer, owned.Groups)
    counted = decision_counts.counts["replaced/groups"]
    buffer._sync_metadata_from_transfer_queue()
    left_out = null_groups.will_be_left_out(buffer._dapo_filtered_keys(TRAIN)[0],
                                            buffer._stale_terminal_keys(trainer.global_steps, TRAIN))
    in_process, finished = len(buffer.prompt_global_steps[TRAIN]), len(buffer.finished_keys[TRAIN])
    if ahead.in_process is None:
        warmup = int(trainer.config.trainer.v1.separate_async.num_warmup_batches * batch)
        ahead.in_process = null_groups.wanted_at_first(in_process - left_out, left_out, warmup,
                                                       Feature.OVERLAP in engine.active_features())
    else:
        ahead.share.note(batch, groups.filtered)
    groups.filtered = 0
    # v1-filter-trained-rows has counted its own
    own = decision_counts.counts["replaced/groups"] - counted
    decision_counts.add("replaced", groups=max(0, left_out - own), null=left_out)
    return null_groups.to_begin(batch, ahead.in_process, finished - left_out, in_process - finished, left_out,
                                ahead.share.foreseen(batch, left_out))
