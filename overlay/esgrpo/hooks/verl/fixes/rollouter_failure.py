"""A rollouter that fails ends the run: verl swallows the exception and stops as if the data had run out."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="rollouter-failure-is-loud",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.fit",
    process=("rollouter",),
    kind="wrap",
    why="fit() gathers its generation task with return_exceptions=True: a dead vLLM server or a reward function that "
        "raises ends in exit code 0, with samples lost",
    remove_when="FullyAsyncRollouter.fit re-raises the failure of its generation task",
    relies_on=("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
               "._streaming_generation_main",),
    without=(("==0.7.0", "the recipe has another rollouter, whose failures are not made loud"),),
)


async def around(call):
    rollouter = call.owner
    failures = []
    generation = rollouter._streaming_generation_main

    async def recorded():
        try:
            return await generation()
        except Exception as error:
            failures.append(error)
            raise

    rollouter._streaming_generation_main = recorded  # shadows the method on this one instance
    result = await call()
    if failures:
        raise said(failures[0])
    return result


def said(error):
    """What to raise for the failure of the generation task: one line that names what died, in which replica."""
    from esgrpo.algo import endings
    from esgrpo.errors import EsgrpoError, RunError
    from esgrpo.hooks.verl.run import reports

    if isinstance(error, EsgrpoError):
        return error
    return RunError("rollout", str(endings.of_error(type(error).__name__, str(error), reports.actor_names())),
                    "a rollouter that runs to its end", "unfinished samples are lost, the run stops",
                    "the cause stands in the log above")
