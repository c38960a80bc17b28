"""Imported by esgrpo.pth or sitecustomize when ESGRPO_ENABLE=1: installs the import hooks of this process."""

import os
import sys

# PYTHONPATH leaks into foreign interpreters; only the one `esgrpo run` was started with gets hooks.
if os.environ.get("ESGRPO_PREFIX", sys.prefix) == sys.prefix:
    from esgrpo import engine

    engine.boot()
