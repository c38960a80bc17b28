"""For runs on a CPU (bench.overlap, bench.train --step-ms): an engine whose steps last longer, later twice as long.

On PYTHONPATH behind the overlay, whose own sitecustomize runs this one in every interpreter of a run. A step of vLLM's
engine core that executes the model then sleeps SLOW_STEP_MS, and from SLOW_AFTER_S seconds (never, where it is not set)
after the first such step on until it has lasted twice as long; SLOW_MARK is a file that gets the time of that moment.
SLOW_TOKEN_MS: so long an update of the policy sleeps for each token of its responses. Without SLOW_STEP_MS nothing is
touched.
"""

import os
import sys


def _slow(module):
    import functools
    import time

    pause_s, after_s = float(os.environ["SLOW_STEP_MS"]) / 1e3, float(os.environ.get("SLOW_AFTER_S", "inf"))
    begun = []

    def slow(step):
        @functools.wraps(step)
        def wrapper(*args, **kwargs):
            before = time.perf_counter()
            outputs, executed = step(*args, **kwargs)
            spent_s = time.perf_counter() - before
            if executed:
                now = time.time()
                if not begun:
                    begun.append(now)
                late = now - begun[0] >= after_s
                if late and len(begun) == 1:
                    begun.append(now)
                    with open(os.environ["SLOW_MARK"], "w", encoding="utf-8") as file:
                        file.write(repr(now))
                time.sleep(2 * pause_s + spent_s if late else pause_s)
            return outputs, executed

        return wrapper

    for name in ("step", "step_with_batch_queue"):
        setattr(module.EngineCore, name, slow(getattr(module.EngineCore, name)))


def _slow_update(module):
    import functools
    import time

    update, pause_s = module.RayPPOTrainer._update_actor, float(os.environ["SLOW_TOKEN_MS"]) / 1e3

    @functools.wraps(update)
    def slow(self, batch):
        time.sleep(pause_s * float(batch.batch["response_mask"].sum()))
        return update(self, batch)

    module.RayPPOTrainer._update_actor = slow


if "SLOW_STEP_MS" in os.environ:
    try:
        import wrapt
    except ImportError:
        print("slow_engine: wrapt is missing, nothing is slowed", file=sys.stderr)
    else:
        wrapt.register_post_import_hook(_slow, "vllm.v1.engine.core")
        if "SLOW_TOKEN_MS" in os.environ:
            wrapt.register_post_import_hook(_slow_update, "verl.trainer.ppo.ray_trainer")
