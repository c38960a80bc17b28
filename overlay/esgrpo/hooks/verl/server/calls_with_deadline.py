"""Every wait of ours for an answer of a server has a deadline: one that never answers must not hold up the run."""

from __future__ import annotations

from esgrpo.errors import EsgrpoError, say

# Far beyond what a healthy server takes: a weight sync of a large model keeps its engine busy for a minute or two.
ANSWER_DEADLINE_S = 300.0

said: set[str] = set()


def late(what: str, consequence: str) -> EsgrpoError:
    return EsgrpoError("servers", f"no answer to {what} within {ANSWER_DEADLINE_S:.0f} s",
                       "one from every vLLM server", consequence,
                       "look for the server in the log above; esgrpo doctor --log knows the usual causes")


async def answers(calls, what: str) -> list:
    """What the calls (awaitables) return, in order; raises EsgrpoError when one does not within the deadline."""
    import asyncio

    try:
        return await asyncio.wait_for(asyncio.gather(*calls), ANSWER_DEADLINE_S)
    except asyncio.TimeoutError:
        raise late(what, "the run cannot go on without it") from None


async def answers_if_any(calls, what: str, consequence: str) -> list:
    """The same for advice and measurements, which must never cost a response: an empty list, said once, when an answer
    is late or Ray has none: a server that is gone, no room to send it."""
    try:
        return await answers(calls, what)
    except EsgrpoError:
        say_late(what, consequence)
    except Exception as error:
        import ray

        if not isinstance(error, ray.exceptions.RayError):
            raise
        say_failed(what, error, consequence)
    return []


def fetched_if_any(references: list, what: str, consequence: str) -> list:
    """`answers_if_any` where nothing can be awaited."""
    import ray

    try:
        return ray.get(references, timeout=ANSWER_DEADLINE_S)
    except ray.exceptions.GetTimeoutError:
        say_late(what, consequence)
    except ray.exceptions.RayError as error:
        say_failed(what, error, consequence)
    return []


def say_late(what: str, consequence: str) -> None:
    """Once per process and kind of call."""
    if what not in said:
        said.add(what)
        say(late(what, consequence))


def say_failed(what: str, error: Exception, consequence: str) -> None:
    """The same of a call to any actor that failed or was late, as Ray says it: of its explanations the first line, of
    a traceback the last one."""
    from ray.exceptions import RayTaskError

    if what not in said:
        said.add(what)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        line = lines[-1] if isinstance(error, RayTaskError) else lines[0]
        say(EsgrpoError(what, line, "an answer", consequence, "report this; the run goes on without"))
