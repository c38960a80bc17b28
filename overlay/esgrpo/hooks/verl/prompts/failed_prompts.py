"""A prompt whose reward raises is given up; the run ends when too many of a weight version are."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import RunError, say

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="failed-prompts-are-bounded",
    target=f"{_ROLLOUTER}._process_single_sample_streaming",
    process=("rollouter",),
    kind="wrap",
    why="one reward function that raises on one prompt ends verl's generation task, and with it the run, again after "
        "every resume",
    after=("resolved-groups-are-replaced",),
    remove_when="verl's rollouter bounds failed prompts instead of ending with the first",
    features=("observe",),
    relies_on=(f"{_ROLLOUTER}._feed_samples", f"{_ROLLOUTER}._processor_worker", f"{_ROLLOUTER}.reset_staleness",
               "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences"),
    without=(("==0.7.0", "the recipe has another rollouter, in which the first failed prompt ends the run"),),
)


async def around(call):
    from esgrpo.hooks.verl.buffer import in_hand
    from esgrpo.hooks.verl.prompts import in_flight

    rollouter = call.owner
    sample = call.arguments["rollout_sample"]
    try:
        with in_hand.holding(sample):
            result = await call()
    except Exception as error:
        if not give_up(rollouter, sample, error):
            raise
        return None
    in_flight.generated(rollouter, sample)
    return result


def bound_of(owner):
    """The FailedPrompts of this rollouter or replay buffer, made on first use."""
    from esgrpo import config
    from esgrpo.algo.failures import FailedPrompts
    from esgrpo.hooks.verl import owned

    failures = owned.of(owner, owned.Failures)
    if failures.bound is None:
        failures.bound = FailedPrompts(config.current().max_failed_prompts, config.facts()["prompts_per_version"])
    return failures.bound


def give_up(rollouter, sample, error) -> bool:
    """True when the prompt alone failed: its place goes to another one. Raises EsgrpoError above the bound."""
    from esgrpo import config
    from esgrpo.algo.failures import Failed, brief, is_of_one_prompt
    from esgrpo.algo.terms import Status
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.groups.replaced_groups import another_instead
    from esgrpo.hooks.verl.prompts import in_flight
    from esgrpo.hooks.verl.prompts.prompt_forecasts import key_of

    if not config.current().enable or not is_of_one_prompt(error):
        return False
    key = key_of(sample)
    index = sample.full_batch.non_tensor_batch.get("index")
    failure = Failed(in_flight.UID + sample.sample_id, words(key, index), brief(error))
    draw = in_flight.draw_of(rollouter, sample)
    in_flight.ended(rollouter, sample, Status.DROPPED)
    another_instead(rollouter)
    rollouter.staleness_samples -= 1
    version = owned.of(rollouter, owned.Failures).version
    note(bound_of(rollouter), version, [failure], {failure.group: (key, draw and draw[0])})
    return True


def words(key, index) -> str:
    """How a user finds the prompt: its key in the history and the books, and the data set's own index of it."""
    index = "" if index is None or not len(index) else f" (index {index[0]})"
    return f"{key or 'without raw_prompt'}{index}"


def note(bound, version, failures, found) -> None:
    """Count, record and say new failures. Raises EsgrpoError above the bound. `found`: group -> (prompt, draw)."""
    from esgrpo import config, records
    from esgrpo.algo.rows import Failed

    for failure in bound.observe(version, failures):
        prompt, draw = found[failure.group]
        records.write(Failed(group=failure.group, prompt=prompt, draw=draw, reason=failure.error))
        say(f"esgrpo: failed prompt: {failure.prompt}: {failure.error}; {len(bound.failed)} of {bound.allowed} that "
            "one weight version may have")
    if bound.too_many:
        raise RunError("failed prompts", str(bound), f"at most {bound.allowed} of the "
                       f"{config.facts()['prompts_per_version']} prompts of a weight version "
                       f"({config.PREFIX}.max_failed_prompts={config.current().max_failed_prompts})",
                       "the run stops", "correct the reward function (or tool) for these prompts, take them out of the "
                       "data, or raise max_failed_prompts")


def next_version(rollouter) -> dict[str, float]:
    """The metric of the weight version that ends; called by rollouter-windows."""
    from esgrpo.hooks.verl import owned

    failures = owned.of(rollouter, owned.Failures)
    if failures.bound is None:
        return {}
    failures.version += 1
    failed = float(len(failures.bound.failed))
    failures.bound.observe(failures.version, ())
    return {"esgrpo/failed_prompts": failed}
