"""Keeps account of every prompt that verl's rollouter takes from its data loader, and gives back those of a checkpoint.

A prompt ends when the trainer has trained it (`trained_prompts`), when it failed or when its group was replaced. What
has not ended is written with every checkpoint (`in_flight_checkpoint`) and comes first after a restart; a run that is
only observed goes on as verl does, without it.
"""

from __future__ import annotations

from esgrpo.engine import Hook

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="prompts-in-flight",
    target=f"{_ROLLOUTER}._create_continuous_iterator",
    process=("rollouter",),
    kind="wrap",
    why="the checkpoint of a fully-async run has the position of the data loader: prompts that were taken from it and "
        "not trained yet are lost at a restart (upstream's own TODO in save_checkpoint)",
    remove_when="verl's rollouter saves its samples in flight with its data loader",
    features=("observe",),
    relies_on=(f"{_ROLLOUTER}._feed_samples", f"{_ROLLOUTER}._process_single_sample_streaming"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)

UID = "uid_"  # verl's prefix of a sample's id in non_tensor_batch["uid"]


def around(call):
    rollouter = call.owner
    return accounted(rollouter, call())


def buffer_of(rollouter):
    """The ExperienceBuffer of this rollouter: empty unless a checkpoint was loaded."""
    from esgrpo.hooks.verl import owned

    return owned.of(rollouter, owned.Experience).buffer


def accounted(rollouter, iterator):
    """verl's stream of (epoch, batch), after the prompts to give back. The feed names the sample when it has it."""
    from esgrpo import records
    from esgrpo.algo.rows import Reissued, Submitted

    buffer = buffer_of(rollouter)
    while buffer.waiting:
        entry = buffer.waiting[0]
        sample = _name(rollouter, entry.epoch)
        buffer.again(sample)
        records.write(Reissued(group=UID + sample, prompt=_key(entry.prompt), draw=entry.draw, was=UID + entry.was))
        yield entry.epoch, entry.prompt
    if _is_over(rollouter):
        return
    for epoch, batch in iterator:
        sample = _name(rollouter, epoch)
        buffer.took(sample, epoch, batch)
        records.write(Submitted(group=UID + sample, prompt=_key(batch), draw=buffer.drawn))
        yield epoch, batch


def _is_over(rollouter) -> bool:
    """The checkpoint was the run's last one, or what came back whole was its rest: the feed looks at the limit after a
    prompt only, and would generate one that nobody trains."""
    from esgrpo import config

    return config.current().enable and rollouter.global_steps > rollouter.total_rollout_steps


def _name(rollouter, epoch: int) -> str:
    """What the feed will call the next sample: a number whose name a sample of the checkpoint has is left out."""
    from esgrpo.hooks.verl import owned

    names = owned.of(rollouter, owned.Experience).names
    while (name := f"sample_{epoch}_{rollouter.global_steps}") in names:
        rollouter.global_steps += 1
        rollouter.total_rollout_steps += 1
    return name


def _key(batch) -> str | None:
    from esgrpo.algo.history import prompt_key

    prompts = batch.get("raw_prompt")
    return None if prompts is None or not len(prompts) else prompt_key(prompts[0])


def draw_of(rollouter, sample) -> tuple[int, bool] | None:
    """(draw, issued again?) of a sample that has not ended; None when nobody keeps account."""
    entry = buffer_of(rollouter).open.get(sample.sample_id)
    return None if entry is None else (entry.draw, bool(entry.was))


def drawn_of(rollouter) -> int:
    """Draws given out so far, over all starts."""
    return buffer_of(rollouter).drawn


def restored(rollouter) -> int:
    """Draws that the loaded checkpoint's data loader had given out; 0 from scratch."""
    return buffer_of(rollouter).restored


def ended(rollouter, sample, status) -> None:
    """The sample will not be trained: a Status of `algo.experience.ENDS`."""
    buffer_of(rollouter).ended([sample.sample_id], status)


def generated(rollouter, sample) -> None:
    """The sample was put into the message queue, its responses in place of the prompt."""
    batch = sample.full_batch
    buffer_of(rollouter).generated(sample.sample_id, len(batch), int(batch.batch["response_mask"].sum()))


def trained(rollouter, uids: list[str]) -> None:
    """Runs inside the rollouter, called by the trainer."""
    buffer_of(rollouter).ended(uid.removeprefix(UID) for uid in uids)


async def next_version(rollouter) -> dict[str, float]:
    """Samples by status at a weight version; what the queue held beyond its bound."""
    from esgrpo.hooks.verl.buffer import nothing_dropped
    from esgrpo.hooks.verl.server.calls_with_deadline import answers_if_any

    buffer = buffer_of(rollouter)
    buffer.synced()
    queue = getattr(rollouter.message_queue_client, "queue_actor", None)
    asked = [] if queue is None else [queue.__ray_call__.remote(nothing_dropped.overflow_of)]
    found = await answers_if_any(asked, "overflow_of", "esgrpo/buffer/beyond_limit lacks this version")
    counts = {**buffer.counts(), "strays": buffer.strays, **(found[0] if found else {})}
    return {f"esgrpo/buffer/{name}": float(number) for name, number in counts.items()}


def take_metrics(rollouter) -> dict[str, float]:
    """For the first weight version after a restart; of v1, the first step of a trainer."""
    from esgrpo.hooks.verl import owned

    restarted = owned.of(rollouter, owned.Restarted)
    lost, restarted.lost = restarted.lost, {}
    return {f"esgrpo/restart/{name}": float(value) for name, value in lost.items()}
