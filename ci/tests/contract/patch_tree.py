"""Trees of verl with chosen git patches, and single classes of them without the imports of their module."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from ci.tests.contract import patched

SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
CLIENT = {"0.7.1": "verl/experimental/fully_async_policy/agent_loop/agent_loop.py",
          "0.8.0": "verl/experimental/fully_async_policy/fully_async_rollouter.py",
          "0.9.0": "verl/workers/rollout/llm_server.py", "0.9.1": "verl/workers/rollout/llm_server.py"}


def source(version: str) -> Path:
    """The unpacked release; skips where it can only come from git and no clone is named."""
    return patched.pristine("verl", f"v{version}")


def series(version: str) -> list[str]:
    return patched.series("verl", f"v{version}")


def touched(version: str, slug: str) -> list[str]:
    return patched.touched(patched.patch_file("verl", f"v{version}", slug))


def tree(version: str, directory: Path, slugs=(), whole: bool = False) -> Path:
    """A copy of the release (or of its files that patches touch) with these patches applied in their order."""
    if whole:
        shutil.copytree(source(version) / "verl", directory / "verl")
    files = () if whole else tuple(file for slug in series(version) for file in touched(version, slug))
    return patched.tree("verl", f"v{version}", list(slugs), directory, also=files)


def fixtures(slug: str, versions, made):
    """Fixtures `plain` and `patched` of a patch's test module, over its releases: what made(version, directory, slugs)
    gives without a patch, and with this one alone as well as with the whole series."""
    @pytest.fixture(params=versions)
    def plain(request, tmp_path):
        return made(request.param, tmp_path, ())

    @pytest.fixture(params=[(version, slugs) for version in versions for slugs in ("alone", "series")], ids="-".join)
    def patched(request, tmp_path):
        version, slugs = request.param
        return made(version, tmp_path, (slug,) if slugs == "alone" else series(version))

    return plain, patched


def lifted(path: Path, name: str, methods: tuple[str, ...], base: type, names: dict) -> type:
    """Class `name` of the file with these methods only, on `base`, seeing `names` as its module's globals."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    node = next(item for item in module.body if isinstance(item, ast.ClassDef) and item.name == name)
    body = [item for item in node.body if getattr(item, "name", "") in methods]
    missing = set(methods) - {item.name for item in body}
    assert not missing, f"{path}: {name} lacks {missing}"
    for function in body:
        function.decorator_list = []
    node.body, node.decorator_list = body, []
    node.bases = [ast.Name("_base", ast.Load())]
    names = {**names, "_base": base, "__name__": "lifted"}
    late = ast.parse("from __future__ import annotations").body  # names in annotations need no stand-ins
    code = compile(ast.fix_missing_locations(ast.Module([*late, node], [])), str(path), "exec", dont_inherit=True)
    exec(code, names)
    return names[name]
