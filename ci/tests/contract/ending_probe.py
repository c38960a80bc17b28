"""Child process: verl's run_ppo with the hook, on a task runner that does what the scene says. Ray is never started."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

SCENE, FOLDER, SAVE_FREQ = sys.argv[1], sys.argv[2], int(sys.argv[3])


def error_of(scene: str):
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError, RayTaskError

    from esgrpo.errors import HookError, RunError
    from esgrpo.hooks.verl.run import stop_request

    def in_the_task_runner(error):
        return RayTaskError("run", f"Traceback (most recent call last):\n{type(error).__name__}: {error}", error,
                            "ray::FullyAsyncTaskRunner.run", 9, "10.0.0.1").as_instanceof_cause()

    context = ActorDiedErrorContext(class_name="AgentLoopWorker", actor_id=bytes(16), pid=77,
                                    node_ip_address="10.0.0.1", name="agent_loop_worker_3",
                                    error_message="The actor is dead.")
    if scene == "died":
        return in_the_task_runner(ActorDiedError(context))
    return in_the_task_runner({
        "ours": RunError("rollout", "the engine died", "an end", "the run stops", "see above"),
        "refused": HookError("a-hook", "lost", "APPLIED", "strict mode stops here", "do"),
        "saved": stop_request.saved(4, FOLDER, SAVE_FREQ)}[scene])


def wait_for_a_signal(times: int) -> None:
    """As in ray.get: Python runs the handler between two waits. The signals come from outside of this thread."""
    for number in range(times):
        threading.Timer(0.2 + number, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(30)


def plain(config, task_runner_class):
    """verl's run_ppo without Ray: ray.init would put its own handler before the task runner is started."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    task_runner_class.options(runtime_env={}).remote()
    if SCENE == "everybody":  # as srun signals every process of a step: the workers go first
        signal.raise_signal(signal.SIGTERM)
        raise error_of("died")
    if SCENE in ("sigterm", "twice"):
        wait_for_a_signal(2 if SCENE == "twice" else 1)
    raise error_of(SCENE)


def early(config, task_runner_class):
    wait_for_a_signal(1)


class TaskRunner:
    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls):
        return cls()


if __name__ == "__main__":
    from esgrpo.call import wrapped
    from esgrpo.hooks.verl.run import driver_ending, stop_request

    stop_request.ask = lambda: print("asked", flush=True)
    trainer = SimpleNamespace(default_local_dir=FOLDER, save_freq=SAVE_FREQ, resume_mode="auto")
    wrapped(driver_ending, early if SCENE == "early" else plain)(SimpleNamespace(trainer=trainer), TaskRunner)
