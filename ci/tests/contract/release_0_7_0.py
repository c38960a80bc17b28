"""verl v0.7.0 in its own process: whole trees, pristine and patched, and stand-ins for what this machine lacks.

`import release_0_7_0` inside the child makes the old sources importable beside newer dependencies. Stand-ins, and why:
transformers has renamed AutoModelForVision2Seq; verl refuses a vLLM whose distribution is not called "vllm"; megatron
is not installed.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

TAG = "v0.7.0"
HERE = Path(__file__).parent
# in order of application; the first one is what the segment path builds on
SLUGS = (
    "partial-server-honours-response-length",
    "segment-keys-through-legacy-actors",
    "tolerate-masked-micro-batches",
    "accept-prompts-without-token-ids",
    "pass-dataset-to-partial-agent-loops",
    "carry-stop-reason-through-partial-server",
)


def whole_tree(directory: Path, slugs=()) -> Path:
    """verl and its recipe in `directory`, with these patches; skips where the sources are not to be had."""
    import shutil

    from ci.tests.contract import patched

    source = patched.pristine("verl", TAG)
    for part in ("verl", "recipe/fully_async_policy"):
        shutil.copytree(source / part, directory / part)
    # what `pip install -e` of the tag leaves; without it the installed release's metadata would be read
    metadata = directory / "verl-0.7.0.dev0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0.dev0\n", encoding="utf-8")
    return patched.tree("verl", TAG, list(slugs), directory)


class _Anything(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIn(ModuleType):
    """A module with an empty class under every name."""

    __path__: list = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class StandIns(MetaPathFinder, Loader):
    """Serves stand-ins for packages that are absent, and for modules that need another release of one."""

    def __init__(self, *roots: str):
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


def importable() -> None:
    """Called in a child whose PYTHONPATH starts with a tree of v0.7.0."""
    import transformers

    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    import verl.utils.model  # takes the name while it is there
    assert "site-packages" not in verl.__file__, verl.__file__


def without_megatron() -> None:
    sys.meta_path.insert(0, StandIns("megatron"))
