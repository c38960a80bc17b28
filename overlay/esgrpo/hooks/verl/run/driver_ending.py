"""Whatever ends a run, the last line says what it was and how to resume; a SIGTERM asks for a checkpoint first."""

from __future__ import annotations

from esgrpo.algo.failures import first_of
from esgrpo.engine import Hook
from esgrpo.errors import EsgrpoError, RunError, Terminated, say

HOOK = Hook(
    slug="driver-ending-in-one-line",
    target="verl.trainer.main_ppo:run_ppo",
    process=("driver",),
    kind="wrap",
    why="a process that dies reaches the user as tracebacks of every process that waited for it, none of which says "
        "which replica it was or whether there is a checkpoint; a SIGTERM aborts the driver inside Ray",
    remove_when="never: it presents the end of a run",
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)

FAILED = 1  # exit code


def around(call):
    from esgrpo.hooks.verl.run import stop_request

    config = call.arguments["config"]
    stop = stop_request.Stop(config)
    call.arguments["task_runner_class"] = stop.when_started(call.arguments["task_runner_class"])
    try:
        with stop:
            return call()
    except KeyboardInterrupt:
        if not stop.asked:
            raise
        leave(stop.unanswered(), stop_request.TERMINATED)
    except Exception as error:
        line, code = said(error, config)
        if stop.asked and code != stop_request.TERMINATED:  # a SIGTERM that reached the workers, too
            stop.reason = f"before a checkpoint was saved: {line.args[1]}"
            line, code = stop.unanswered(), stop_request.TERMINATED
        leave(line, code, error)


def said(error, config) -> tuple[object, int]:
    """The line and the exit code for what came out of verl's run_ppo."""
    from esgrpo.algo import endings
    from esgrpo.hooks.verl.run import reports, resume_point, stop_request

    line = first_of(error, EsgrpoError)
    if isinstance(line, Terminated):
        return line, stop_request.TERMINATED
    if isinstance(line, RunError):
        *parts, todo = line.args
        return RunError(*parts, f"{todo}; {resume_point.advice(config)}"), FAILED
    if line is not None:
        return line, FAILED
    ending = endings.of_error(type(error).__name__, str(error), reports.actor_names())
    return RunError("ended", str(ending), "a run that goes to its end", "what came after the last checkpoint is lost",
                    resume_point.advice(config)), FAILED


def leave(line, code: int, error=None):
    """End the driver: Ray's log of the workers stops first, so that nothing follows our line."""
    import sys
    import traceback


    if error is not None and first_of(error, EsgrpoError) is None:
        traceback.print_exception(error)
    _close_ray()
    sys.stdout.flush()
    say(line)
    sys.exit(code)


CLOSE_S = 30.0


def _close_ray() -> None:
    """Within a deadline: a cluster that has lost its head may never answer."""
    import threading

    import ray

    closing = threading.Thread(target=ray.shutdown, daemon=True)
    closing.start()
    closing.join(CLOSE_S)
