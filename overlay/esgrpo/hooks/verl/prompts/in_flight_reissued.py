"""After a restart of a fully-async run, prompts that were in flight at the checkpoint come first."""

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
    from esgrpo.algo.rows import Start
    from esgrpo.hooks.verl.prompts.in_flight import ledger_of
    from esgrpo.hooks.verl.run.resume_point import step_of

    ledger = ledger_of(rollouter)
    records.write(Start(resumed_step=step_of(folder or ""), drawn=ledger.restored,
                        gives_back=[entry.draw for entry in ledger.waiting],
                        prompts_per_epoch=len(rollouter.train_dataloader)))


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

    from esgrpo.algo.resuming import InFlight, reissued_words
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.prompts.in_flight_checkpoint import load

    if not os.path.exists(os.path.join(folder, DATA)):  # verl starts the data from scratch, and says so
        return
    reason = "it was written without esgrpo, or by an older one"
    try:
        state = load(folder)
    except ValueError as error:
        state, reason = None, str(error)
    if state is None:
        owned.of(rollouter, owned.InFlightPrompts).ledger = InFlight(trained)
        say(f"esgrpo: restart: {folder} does not say which prompts were in flight ({reason}): what the data loader "
            "had given out and was not trained is not trained in this epoch")
        return
    drawn, entries = state
    owned.of(rollouter, owned.InFlightPrompts).ledger = InFlight(drawn, entries)
    finished = sum(entry.responses for entry in entries)
    size = rollouter.config.actor_rollout_ref.rollout.n
    lost = {"groups": len(entries), "finished": finished, "tokens": sum(entry.tokens for entry in entries),
            "running": len(entries) * size - finished}
    if entries:
        owned.of(rollouter, owned.Restarted).lost = lost
        say(f"esgrpo: {reissued_words(**lost)}")
