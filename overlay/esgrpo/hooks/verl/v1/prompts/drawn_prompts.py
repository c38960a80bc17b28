"""Records every prompt that a v1 trainer draws from its data, and what each start and checkpoint knows of them."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

HOOK = Hook(
    slug="v1-drawn-prompts",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._next_train_batch",
    process=("v1-task-runner",),
    kind="wrap",
    why="every prompt that is drawn to be trained comes from here, with the id that its group has from then on",
    remove_when="verl records which prompts of the data were trained",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer._fetch_one_gen_batch",),
    without=(("<0.9", "these releases have no v1 trainers"),),
)

WAITING = ("pending", "running")  # of verl's status tag: groups that are generated again after a restart


def around(call):
    trainer = call.owner
    batch = call()
    record(trainer, batch)
    return batch


def record(trainer, batch) -> None:
    from esgrpo import records
    from esgrpo.algo.history import prompt_key
    from esgrpo.algo.rows import Submitted
    from esgrpo.hooks.verl import owned

    drawn = owned.of(trainer, owned.Drawn)
    for group, prompt in zip(batch["uid"], batch["raw_prompt"], strict=True):
        drawn.draws += 1
        if trainer.trainer_mode == "sync":
            drawn.open.add(str(group))
        records.write(Submitted(group=str(group), prompt=prompt_key(getattr(prompt, "data", prompt)),
                                draw=drawn.draws))


def note_surplus(trainer, trained: set[str]) -> None:
    """Under `sync` verl discards groups of a step beyond its batch, and does not say which."""
    from esgrpo import records
    from esgrpo.algo.rows import Evicted
    from esgrpo.hooks.verl import owned

    if trainer.trainer_mode != "sync":
        return
    buffer, here = trainer.replay_buffer, owned.of(trainer, owned.Drawn).open
    gone = here - set(buffer.prompt_global_steps[TRAIN])
    for group in sorted(gone - trained - owned.of(buffer, owned.Groups).evicted.keys()):
        records.write(Evicted(group=group, reason="surplus"))
    here -= gone | trained


def drawn_of(trainer) -> int:
    """Prompts drawn so far, over all starts of the run."""
    from esgrpo.hooks.verl import owned

    return owned.of(trainer, owned.Drawn).draws


def started(trainer, tags: dict[str, dict]) -> None:
    """The row of this start, and of the groups that the TransferQueue brought back. `tags`: of its keys."""
    import os

    from esgrpo import records
    from esgrpo.algo.rows import Reissued, Restored, Start
    from esgrpo.hooks.verl import owned

    step, run_dir, run = trainer.global_steps - 1, os.environ.get(records.ENV_RUN_DIR), records.identity()["run"]
    saved = [row.drawn for row in (records.read(run_dir, "checkpoint") if run_dir and step else ())
             if row.step == step and row.run == run]
    owned.of(trainer, owned.Drawn).draws = saved[-1] if saved else 0
    loader = trainer.train_dataloader
    records.write(Start(resumed_step=step, drawn=drawn_of(trainer),
                        prompts_per_epoch=len(loader) * (getattr(loader, "batch_size", None) or 1)))
    prompts = {key: tag.get("status") for key, tag in tags.items() if tag.get("is_prompt", False)}
    for group in (group for group, status in prompts.items() if status in WAITING):
        records.write(Reissued(group=group, was=group))
    restored = [group for group, status in prompts.items() if status not in WAITING]
    if restored:
        records.write(Restored(groups=restored))


def saved(trainer) -> None:
    """The row of a checkpoint that is about to be saved; what it holds is in the books before it counts."""
    from esgrpo import records
    from esgrpo.algo.rows import Checkpoint

    records.write(Checkpoint(step=trainer.global_steps, drawn=drawn_of(trainer)))
    records.flush()
