"""An interpreter that has imported the libraries below verl and vLLM once, and forks for every script it is given.

`python forked_python.py` reads requests, one JSON object a line, and answers each with the exit code of its script.
Most of the seconds of a script that imports verl are those of torch and transformers. What is under test is imported
by the fork: the path and the environment are set, sitecustomize runs, and only then the script does, as in a new
interpreter. Of what hooks are on only a module of torch is imported here; the overlay meets it after its own start.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import site
import sys

LIBRARIES = ("transformers", "tensordict", "torch._inductor.lowering", "torch.distributed.fsdp", "datasets", "pandas",
             "hydra", "uvicorn", "fastapi", "openai", "transformers.models.auto.modeling_auto",
             "transformers.models.auto.tokenization_auto", "transformers.models.auto.processing_auto")
HOOKED = "torch.distributed.distributed_c10d"
UNDER_TEST = ("verl", "vllm", "ray", "esgrpo", "recipe")


def forked() -> dict:
    """The request that this process was forked for; the parent stays in here until its input ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    early = [name for name in UNDER_TEST if name in sys.modules]
    gc.freeze()  # else the collector of each fork copies the pages of all that was imported
    print(json.dumps(early), flush=True)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            return json.loads(line)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)


def become(request: dict) -> tuple[str, str]:
    """(source, file name) of what to run, everything else as a new interpreter would find it.

    Without a file it is the source of -c, without a source it is the module of -m.
    """
    signal.alarm(request["timeout"])
    for stream, name in enumerate(("stdin", "stdout", "stderr")):
        handle = os.open(request[name], os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, stream)
        os.close(handle)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    script, *arguments = request["arguments"]
    if script in ("-c", "-m"):
        source, file = (arguments[0], "") if script == "-c" else ("", arguments[0])
        sys.argv = [script, *arguments[1:]]
    else:
        with open(script, encoding="utf-8") as opened:
            source, file, sys.argv = opened.read(), script, [script, *arguments]
    sys.orig_argv = [sys.executable, script, *arguments]
    directory = {"-c": "", "-m": os.getcwd()}.get(script, os.path.dirname(os.path.abspath(script)))
    paths = [path for path in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    # site adds nothing that is there already: the overlay may also be installed, as after the quickstart
    sys.path[:] = [directory, *paths, *(path for path in sys.path[1:] if path not in paths)]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    hooked = sys.modules.pop(HOOKED)
    site.execsitecustomize()
    sys.modules[HOOKED] = hooked
    if "wrapt" in sys.modules:
        sys.modules["wrapt"].notify_module_loaded(hooked)
    return source, file


if __name__ == "__main__":
    sys.stdin.reconfigure(line_buffering=True)
    _source, __file__ = become(forked())
    sys.stdin = open(0)  # noqa: SIM115
    if not _source:
        runpy.run_module(__file__, run_name="__main__", alter_sys=True)
    else:
        _file = __file__ or "<string>"
        if not __file__:
            del __file__  # else processes that multiprocessing spawns would look for it
        exec(compile(_source, _file, "exec"))
