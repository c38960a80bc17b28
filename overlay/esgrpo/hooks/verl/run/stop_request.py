"""SIGTERM in the driver, and how the trainer hears of it: the key-value store of Ray's head, under the id of the job.

A flag in the run directory would reach only those that share it; a call of the trainer would wait behind its `fit`.
"""

from __future__ import annotations

import os
import signal
import threading

from esgrpo.errors import Terminated, say

TERMINATED = 128 + signal.SIGTERM


def _key() -> str:
    import ray

    return f"esgrpo_stop_{ray.get_runtime_context().get_job_id()}"


def ask() -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_key(), b"1")


def asked() -> bool:
    """Has the driver of this job been told to stop? One short call to Ray's head; no answer is no."""
    from ray.experimental import internal_kv

    try:
        return internal_kv._internal_kv_exists(_key())
    except Exception:  # the head is gone, or too busy: others will say so
        return False


def saved(step: int, folder: str, save_freq: int):
    """What a trainer raises when it has saved, or could not."""

    if save_freq <= 0:
        return not_saved(save_freq)
    path = os.path.join(os.path.abspath(folder), f"global_step_{step}")
    return Terminated("SIGTERM", "the driver was told to stop", "a checkpoint of the running step, which was saved",
                      "the run stops", f"resume: the same command goes on from {path}")


def not_saved(save_freq: int):

    return Terminated("SIGTERM", "the driver was told to stop", "a checkpoint of the running step", f"none is saved: "
                      f"trainer.save_freq={save_freq} forbids it, the run stops", "nothing to resume from but what is "
                      "there already; trainer.save_freq=N (any N > 0) lets a SIGTERM save")


class Stop:
    """The driver's SIGTERM handler for the time of `with`.

    The first signal asks for a checkpoint and goes on; a second one, the deadline, or one that comes before there is a
    task runner or that nothing can be saved for, raises KeyboardInterrupt: of all exceptions only that one leaves
    `ray.get` from a signal handler.
    """

    def __init__(self, config):
        self.config, self.asked, self.reason = config, False, ""
        self._started, self._before, self._over = False, None, threading.Event()

    def __enter__(self):
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_):
        self._over.set()
        if self._main:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def when_started(self, task_runner_class):
        """The class, with a look at the moment when it is started: ray.init has put a handler of its own by then."""
        return _Starting(task_runner_class, self._armed)

    def _armed(self) -> None:
        self._started = True
        if self._main:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number, _frame) -> None:
        from esgrpo import config

        deadline, save_freq = config.current().sigterm_deadline, self.config.trainer.save_freq
        if self.asked:
            self.reason = self.reason or "a second SIGTERM came before the step had ended"
        elif not self._started:
            self.reason = "training had not begun"
        elif save_freq <= 0:
            self.reason = f"trainer.save_freq={save_freq} forbids a checkpoint"
        elif not deadline:
            self.reason = f"{config.PREFIX}.sigterm_deadline=0 leaves no time for a checkpoint"
        else:
            self.asked = True
            threading.Thread(target=self._ask_and_wait, args=(deadline,), daemon=True).start()
            return
        self.asked = True
        raise KeyboardInterrupt

    def _ask_and_wait(self, deadline: int) -> None:
        from esgrpo import config

        say(f"esgrpo: SIGTERM: a checkpoint is saved when the running step has ended, in {deadline} s at most "
            f"({config.PREFIX}.sigterm_deadline); a second SIGTERM stops at once")
        ask()
        if not self._over.wait(deadline):
            self.reason = f"the running step took more than {deadline} s ({config.PREFIX}.sigterm_deadline)"
            os.kill(os.getpid(), signal.SIGTERM)

    def unanswered(self):
        """The line for a SIGTERM after which nothing was saved."""
        from esgrpo.hooks.verl.run import resume_point

        return Terminated("SIGTERM", self.reason, "a checkpoint of the running step", "none was saved, the run stops",
                          resume_point.advice(self.config))


class _Starting:
    """Stands in for a Ray actor class in verl's run_ppo, which calls `remote`, or `options` and then `remote`."""

    def __init__(self, actor_class, then):
        self._class, self._then = actor_class, then

    def options(self, *args, **kwargs):
        return _Starting(self._class.options(*args, **kwargs), self._then)

    def remote(self, *args, **kwargs):
        actor = self._class.remote(*args, **kwargs)
        self._then()
        return actor

    def __getattr__(self, name):
        return getattr(self._class, name)
