"""Finished samples that wait in verl's queue are saved with a checkpoint, and wait again after a restart."""

from __future__ import annotations

import contextlib
import os

from esgrpo.engine import Hook
from esgrpo.errors import EsgrpoError, say

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="finished-samples-come-back",
    target=f"{_ROLLOUTER}.fit",
    process=("rollouter",),
    kind="wrap",
    why="the queue is gone with its process: every sample in it would be generated a second time",
    after=("history-saved-at-end",),
    remove_when="verl's rollouter saves its queue with its data loader",
    features=("observe",),
    relies_on=(f"{_ROLLOUTER}.save_checkpoint", f"{_ROLLOUTER}.load_checkpoint", f"{_ROLLOUTER}._feed_samples",
               f"{_ROLLOUTER}.reset_staleness",
               "verl.experimental.fully_async_policy.message_queue:MessageQueueClient.put_sample"),
    without=(("==0.7.0", "the recipe has another queue, whose samples are generated again"),),
)

FILE = "esgrpo_finished.pt"  # samples as verl sends them, pickled; beside verl's own data.pt
WEIGHTS = "actor"  # verl's folder of them in a checkpoint
FORMAT = 1


async def around(call):
    from esgrpo.hooks.verl import owned

    rollouter = call.owner
    experience = owned.of(rollouter, owned.Experience)
    whole, experience.whole = experience.whole, []
    for sample in whole:
        await rollouter.message_queue_client.put_sample(sample=sample)
    rollouter.staleness_samples += len(whole)
    rollouter.total_generated_samples += len(whole)
    return await call()


def off() -> bool:
    """Nobody would put them back, or the run is only observed: they are neither saved nor taken from a checkpoint."""
    from esgrpo import config, engine

    return not config.current().enable or bool(engine.out_of_action(HOOK.slug))


async def in_queue(rollouter) -> list:
    """The samples that wait in the queue; none where it does not answer, said once: they would start anew."""
    from esgrpo.hooks.verl.server.calls_with_deadline import answers_if_any

    queue = getattr(getattr(rollouter, "message_queue_client", None), "queue_actor", None)
    if queue is None or off():
        return []
    found = await answers_if_any([queue.__ray_call__.remote(_held)], "held", "a restart generates what waits again")
    return [sample for samples in found for sample in samples]


def _held(queue) -> list:
    """Runs inside the queue's actor."""
    from esgrpo.algo.experience import SentSample

    return [sample for sample in queue.queue if isinstance(sample, SentSample)]


def still_open(samples, known) -> list:
    """Without those that have ended since."""
    return [sample for sample in samples if sample.name in known]


def save(samples, folder: str) -> None:
    """A failed write costs time after a restart, not the checkpoint. Those of checkpoints without weights go."""
    import torch

    from esgrpo import releases

    path = os.path.join(folder, FILE)
    content = {"format": FORMAT, "verl": releases.installed("verl"),
               "samples": [(bytes(sample), sample.name, sample.version) for sample in samples]}
    try:
        torch.save(content, path + ".new")
        os.replace(path + ".new", path)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when a disk is full
        say(EsgrpoError("finished samples", f"{path}: {error}", "written with the checkpoint",
                        f"{len(samples)} samples would be generated again after a restart from it", "make room"))
    _forget_others(folder)


def _forget_others(folder: str) -> None:
    """verl removes the weights of an old checkpoint (trainer.max_actor_ckpt_to_keep) and leaves its folder."""
    parent, mine = os.path.split(os.path.abspath(folder))
    with contextlib.suppress(OSError):  # they only take room
        for name in os.listdir(parent):
            path = os.path.join(parent, name, FILE)
            if name != mine and os.path.exists(path) and not os.path.isdir(os.path.join(parent, name, WEIGHTS)):
                os.remove(path)


def load(folder: str) -> list:
    """As saved; none when the checkpoint has none, or one that this verl may not understand, which is said."""
    import torch

    from esgrpo import releases
    from esgrpo.algo.experience import SentSample

    path, verl = os.path.join(folder, FILE), releases.installed("verl")
    if not os.path.exists(path):
        return []
    try:
        content = torch.load(path, weights_only=False)
        if (content["format"], content["verl"]) != (FORMAT, verl):
            raise ValueError(f"format {content['format']} of verl {content['verl']}, not {FORMAT} of verl {verl}")
        return [SentSample.of(*sample) for sample in content["samples"]]
    except Exception as error:  # pickle raises anything for a damaged file
        say(f"esgrpo: restart: {path}: {type(error).__name__}: {error}: finished samples are generated again")
        return []


def come_back(rollouter, folder: str) -> None:
    """What the checkpoint holds whole need not be issued; it counts as fed, and goes to the queue when verl starts."""
    from esgrpo.hooks.verl import owned

    experience = owned.of(rollouter, owned.Experience)
    samples = {} if off() else {sample.name: sample for sample in load(folder)}
    found = experience.buffer.back(samples)
    experience.whole = [samples[entry.was] for entry in found]
    experience.names = frozenset(entry.was for entry in found)
    rollouter.global_steps += len(found)
    if found:
        say(f"esgrpo: restart: {len(found)} prompt groups come back whole, with {sum(e.responses for e in found)} "
            f"responses ({sum(e.tokens for e in found)} tokens)")
