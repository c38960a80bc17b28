"""Imported by esgrpo.pth or sitecustomize when ESGRPO_ENABLE=1: installs the import hooks of this process."""

import os
import sys

# PYTHONPATH leaks into foreign interpreters; only the one `esgrpo run` was started with gets hooks.
if os.environ.get("ESGRPO_PREFIX", sys.prefix) == sys.prefix:
    try:
        from esgrpo import engine, guard

        engine.boot(cannot_act=guard.check_import)
    except Exception as error:  # any program can be started in this environment, and it must go on
        from esgrpo.errors import say

        say(f"esgrpo: boot: {type(error).__name__}: {' '.join(str(error).split())} | wanted a loadable overlay | "
            "hooks are not installed here | install wrapt and packaging, or unset ESGRPO_ENABLE")
