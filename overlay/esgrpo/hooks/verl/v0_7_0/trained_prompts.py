"""verl 0.7.0: tells the recipe's rollouter which prompts have been trained, before the weights are synced."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER
from esgrpo.hooks.verl.v0_7_0.taken_prompts import TRAINER

HOOK = Hook(
    slug="partial-trained-prompts",
    target=f"{TRAINER}._trigger_parameter_sync_after_step",
    process=("trainer",),
    kind="wrap",
    why="as trained-prompts, and earlier: after a sync the recipe's rollouter validates in its event loop and hears "
        "nothing until that is over, while the trainer goes on to its checkpoint",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(f"{TRAINER}.fit", f"{TRAINER}.set_parameter_synchronizer",
               "recipe.fully_async_policy.param_sync:ParameterSynchronizer.__init__"),
    without=((LATER, ELSEWHERE),),
)


def around(call):
    from esgrpo.hooks.verl.prompts import trained_prompts

    trainer = call.owner
    if knows_rollouter(trainer):
        trained_prompts.tell(trainer)
    return call()


def knows_rollouter(trainer) -> bool:
    """The recipe's trainer has no handle of it; its synchronizer, idle between two syncs, has one."""
    import ray

    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.prompts import trained_prompts
    from esgrpo.hooks.verl.server import calls_with_deadline

    if not hasattr(trainer, "rollouter"):
        asked = trainer.param_synchronizer.__ray_call__.remote(_rollouter_of)
        try:
            trainer.rollouter = ray.get(asked, timeout=calls_with_deadline.ANSWER_DEADLINE_S)
        except ray.exceptions.GetTimeoutError:
            trained_prompts.say_silent("the synchronizer")
            owned.take(trainer, owned.TrainedPrompts)
            return False
    return True


def _rollouter_of(synchronizer):
    """Runs inside the synchronizer."""
    return synchronizer.rollouter
