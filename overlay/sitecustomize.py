"""Loads the ES-GRPO overlay in every interpreter that has overlay/ on PYTHONPATH. All logic is in esgrpo.boot.

Without ESGRPO_ENABLE=1 this is one environment look-up and the sitecustomize that this file shadows.
"""

import os
import sys

if os.environ.get("ESGRPO_ENABLE") == "1":
    try:
        import esgrpo.boot  # noqa: F401
    except Exception as error:  # a foreign program on the same PYTHONPATH must go on
        print(f"esgrpo: boot: {type(error).__name__}: {error} | wanted a loadable overlay | hooks are not installed "
              "here | install wrapt and packaging, or unset ESGRPO_ENABLE", file=sys.stderr)


def _chain():
    """Run the sitecustomize that this one hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)


_chain()
