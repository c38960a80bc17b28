"""Loads the ES-GRPO overlay in every interpreter that has overlay/ on PYTHONPATH. All logic is in esgrpo.boot.

Without ESGRPO_ENABLE=1 this is one environment look-up and the sitecustomize that this file shadows.
"""

import os
import sys


def _chain():
    """Run the sitecustomize that this one hides.

    Others chain, too, and may come back to us: each directory is run once. importlib.util has module_from_spec, but
    importing it would make every start on this path a quarter longer (bench/startup.py).
    """
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    seen = sys.__dict__.setdefault("_esgrpo_sitecustomized", set())
    if here in seen:
        return
    seen.add(here)
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") not in seen])
    if spec is not None and spec.loader is not None:
        module = type(sys)(spec.name)
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
        spec.loader.exec_module(module)


try:
    if os.environ.get("ESGRPO_ENABLE") == "1":
        import esgrpo.boot  # noqa: F401
finally:
    _chain()
