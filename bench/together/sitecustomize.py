"""For bench.train --together alone: runs that start side by side on the same GPUs are let go at the same moment.

On PYTHONPATH behind the overlay, whose own sitecustomize runs this one in every interpreter of a run. A run that has
its replicas touches TOGETHER_GATE.at and waits, before its first weight sync, while the file TOGETHER_GATE is there.
vLLM measures the free memory of a GPU when it starts, so that engines there take turns: TOGETHER_TURN is their lock;
without it they were told their memory. Without TOGETHER_GATE nothing is touched. verl and vLLM choose a worker's port
before they make the worker, up to a minute before it is bound where many start at once, and others have taken it then:
a worker that is alone in its process group chooses again.
"""

import os
import sys

LIMIT_S = 1800.0  # a gate that nobody opens


def _hold(module):
    import functools
    import inspect
    import time

    manager = module.CheckpointEngineManager
    original, signature = manager.__init__, inspect.signature(manager.__init__)

    @functools.wraps(original)
    def init(*args, **kwargs):
        original(*args, **kwargs)
        if not signature.bind(*args, **kwargs).arguments.get("replicas"):
            return  # v1 makes a manager without replicas first
        gate, begun = os.environ["TOGETHER_GATE"], time.monotonic()
        with open(gate + ".at", "w", encoding="utf-8"):
            pass
        while os.path.exists(gate):
            if time.monotonic() - begun > LIMIT_S:
                raise RuntimeError(f"together: {gate} is there after {LIMIT_S:.0f} s | wanted that bench.train opens it"
                                   " | this run ends | start the command again")
            time.sleep(0.1)

    manager.__init__ = init


def _choose_port_late(module):
    """Of a process group of one process alone: nobody else has to know its port."""
    import functools
    import inspect
    import socket

    original = module.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        size = given.get("world_size", -1)
        alone = (int(os.environ.get("WORLD_SIZE", -1)) if size == -1 else size) == 1
        if alone and given.get("store") is None:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            method = given.get("init_method") or "env://"
            if method.startswith("env://"):
                os.environ["MASTER_PORT"] = str(port)
            elif method.startswith("tcp://"):
                given["init_method"] = f"{method.rpartition(':')[0]}:{port}"
        return original(*bound.args, **bound.kwargs)

    module.init_process_group = init_process_group


def _take_turns(module):
    import fcntl
    import functools

    begin, end = module.Worker.init_device, module.Worker.compile_or_warm_up_model
    held = []

    @functools.wraps(begin)
    def init_device(*args, **kwargs):
        held.append(open(os.environ["TOGETHER_TURN"], "w", encoding="utf-8"))  # the lock goes with its process
        fcntl.flock(held[-1], fcntl.LOCK_EX)
        return begin(*args, **kwargs)

    @functools.wraps(end)
    def compile_or_warm_up_model(*args, **kwargs):
        try:
            return end(*args, **kwargs)
        finally:
            while held:
                held.pop().close()

    module.Worker.init_device, module.Worker.compile_or_warm_up_model = init_device, compile_or_warm_up_model


if "TOGETHER_GATE" in os.environ:
    try:
        import wrapt
    except ImportError:
        print("together: wrapt is missing, runs do not wait for each other", file=sys.stderr)
    else:
        wrapt.register_post_import_hook(_hold, "verl.checkpoint_engine.base")
        wrapt.register_post_import_hook(_choose_port_late, "torch.distributed")
        if "TOGETHER_TURN" in os.environ:
            wrapt.register_post_import_hook(_take_turns, "vllm.v1.worker.gpu_worker")
