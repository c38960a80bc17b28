"""After a restart of a fully-async run, prompts that were in flight at the checkpoint come first.

Those whose responses had ended and waited for the trainer come back whole (`buffer.whole_samples`)."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import say

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="prompts-in-flight-are-reissued",
    target=f"{_ROLLOUTER}.load_checkpoint",
    process=("rollouter",),
    kind="wrap",
    why="the data loader goes on behind the prompts that were in flight, and nobody says how many are lost",
    remove_when="verl's rollouter restores its samples in flight",
    features=("observe",),
    relies_on=(f"{_ROLLOUTER}._feed_samples",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)

DATA = "data.pt"  # verl's state of the data loader


def around(call):
    rollouter = call.owner
    before = rollouter.global_steps
    result = call()
    folder = folder_of(rollouter.config.trainer)
    if folder is not None:
        give_back(rollouter, folder, trained=rollouter.global_steps - before)
    record(rollouter, folder)
    return result


def record(rollouter, folder: str | None) -> None:
    """One row per start: what it goes on from."""
    from esgrpo import records
    from esgrpo.algo.rows import Restored, Start
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.prompts.in_flight import UID
    from esgrpo.hooks.verl.run.resume_point import step_of

    experience = owned.of(rollouter, owned.Experience)
    records.write(Start(resumed_step=step_of(folder or ""), drawn=experience.buffer.restored,
                        gives_back=[entry.draw for entry in experience.buffer.waiting],
                        prompts_per_epoch=len(rollouter.train_dataloader)))
    if experience.whole:
        records.write(Restored(groups=[UID + sample.name for sample in experience.whole]))


def folder_of(trainer) -> str | None:
    """The checkpoint that verl loads under these settings; None from scratch."""
    import os

    from esgrpo.hooks.verl.run import resume_point

    if trainer.resume_mode == "disable":
        return None
    given = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    return os.path.abspath(given) if given else resume_point.latest(os.path.abspath(trainer.default_local_dir))


def give_back(rollouter, folder: str, trained: int) -> None:
    """`trained`: prompts up to the checkpoint, by verl's count."""
    import os

    from esgrpo import config
    from esgrpo.algo.experience import ExperienceBuffer
    from esgrpo.algo.resuming import reissued_words
    from esgrpo.algo.terms import Status
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.buffer import whole_samples
    from esgrpo.hooks.verl.prompts import in_flight_checkpoint

    if not os.path.exists(os.path.join(folder, DATA)):  # verl starts the data from scratch, and says so
        return
    reason = "it was written without esgrpo, or by an older one"
    experience = owned.of(rollouter, owned.Experience)
    try:
        found = in_flight_checkpoint.load(folder)
    except ValueError as error:
        found, reason = None, str(error)
    if found is None:
        experience.buffer = ExperienceBuffer(trained, ended={Status.TRAINED: trained})
        say(f"esgrpo: restart: {folder} does not say which prompts were in flight ({reason}): what the data loader "
            "had given out and was not trained is not trained in this epoch")
        return
    if not config.current().enable:  # observe decides nothing: as verl does, what was in flight is left out
        experience.buffer = ExperienceBuffer(found.drawn, ended=found.ends)
        if found.waiting:
            say(f"esgrpo: restart: {len(found.waiting)} prompts that were in flight are not trained in this epoch, as "
                "in plain verl: the run is only observed (segment.enable=True gives them back)")
        return
    experience.buffer = found
    count_on(rollouter, found)
    whole_samples.come_back(rollouter, folder)
    entries = found.waiting
    finished = sum(entry.responses for entry in entries)
    size = rollouter.config.actor_rollout_ref.rollout.n
    lost = {"groups": len(entries), "finished": finished, "tokens": sum(entry.tokens for entry in entries),
            "running": len(entries) * size - finished}
    if entries:
        owned.of(rollouter, owned.Restarted).lost = lost
        say(f"esgrpo: {reissued_words(**lost)}")


def count_on(rollouter, buffer) -> None:
    """The feed goes on from what was trained, towards as many prompts as the run was asked for.

    verl counts versions times the configured batch, which is another number where overlap control moved the trigger,
    and its limit begins without the prompts that had taken the place of others.
    """
    from esgrpo.algo.terms import Status

    if buffer.unknown:  # an older checkpoint does not say how its prompts ended
        return
    gone = buffer.ends[Status.PRUNED] + buffer.ends[Status.DROPPED]
    prompts = len(rollouter.train_dataloader) * rollouter.config.trainer.total_epochs
    rollouter.global_steps = buffer.ends[Status.TRAINED] + gone + 1
    rollouter.total_rollout_steps = min(rollouter.total_rollout_steps + gone, prompts)
