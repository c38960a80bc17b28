"""Tells the rollouter which prompts have been trained: those of a batch, when the next one is asked for."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import EsgrpoError, say
from esgrpo.hooks.verl.server import calls_with_deadline

_TRAINER = "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer"

HOOK = Hook(
    slug="trained-prompts",
    target=f"{_TRAINER}._get_samples_from_queue",
    process=("trainer",),
    kind="wrap",
    why="the rollouter, which saves the data loader, does not know what became of the samples that left its queue",
    remove_when="verl's rollouter saves its samples in flight with its data loader",
    features=("observe",),
    relies_on=(f"{_TRAINER}.fit_step", f"{_TRAINER}._fit_generate",
               "verl.experimental.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


async def around(call):
    trainer = call.owner
    tell(trainer)
    result = await call()
    _epoch, batch = result
    taken(trainer, batch)
    return result


def taken(trainer, batch) -> None:
    """The trainer has this batch, or none, for its next update."""
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import trained_rows

    if batch is not None and "uid" in batch.non_tensor_batch:
        untold = owned.of(trainer, owned.TrainedPrompts).untold = sorted(set(batch.non_tensor_batch["uid"]))
        trained_rows.begin(untold, step=trainer.current_param_version + 1)


def tell(trainer) -> None:
    """Calls are not waited for, nor do they arrive in order: those that are under way are kept for `wait`."""
    import ray

    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.prompts import in_flight

    prompts = owned.of(trainer, owned.TrainedPrompts)
    uids, prompts.untold, under_way = prompts.untold, [], prompts.under_way
    if uids:
        _, under_way[:] = ray.wait(under_way, num_returns=len(under_way), timeout=0) if under_way else ([], [])
        under_way.append(trainer.rollouter.__ray_call__.remote(in_flight.trained, uids))


def wait(trainer) -> None:
    """Until the rollouter has heard everything. Raises what the rollouter raised."""
    import ray

    from esgrpo.hooks.verl import owned

    prompts = owned.of(trainer, owned.TrainedPrompts)
    under_way, prompts.under_way = prompts.under_way, []
    try:
        ray.get(under_way, timeout=calls_with_deadline.ANSWER_DEADLINE_S)
    except ray.exceptions.GetTimeoutError:
        say_silent("the rollouter")


def say_silent(who: str) -> None:
    seconds = calls_with_deadline.ANSWER_DEADLINE_S
    say(EsgrpoError("trained prompts", f"{who} is silent for {seconds:.0f} s", "an answer",
                    "a restart from the next checkpoint may train some prompts twice", f"see the log of {who}"))
