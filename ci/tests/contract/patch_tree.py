"""Trees of verl with chosen git patches, and single classes of them without the imports of their module."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from esgrpo import upstreams

PATCHES = Path(__file__).resolve().parents[3] / "patches" / "verl"
SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
CLIENT = {"0.7.1": "verl/experimental/fully_async_policy/agent_loop/agent_loop.py",
          "0.8.0": "verl/experimental/fully_async_policy/fully_async_rollouter.py",
          "0.9.0": "verl/workers/rollout/llm_server.py", "0.9.1": "verl/workers/rollout/llm_server.py"}


def source(version: str) -> Path:
    """The unpacked release; skips where it can only come from git and no clone is named."""
    try:
        return upstreams.sources("verl", version)
    except upstreams.Unavailable as error:
        if not upstreams.needs_git("verl", version):
            raise
        pytest.skip(str(error))


def series(version: str) -> list[str]:
    return (PATCHES / f"v{version}" / "series").read_text(encoding="utf-8").split()


def patch(version: str, slug: str) -> Path:
    return PATCHES / f"v{version}" / f"{slug}.patch"


def touched(version: str, slug: str) -> list[str]:
    lines = patch(version, slug).read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


def git_apply(tree: Path, version: str, slug: str, *options: str) -> None:
    # inside a repository git apply skips files that it does not track: look for none above the tree
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(["git", "apply", *options, str(patch(version, slug))], cwd=tree, capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, f"{version} {slug}: {done.stderr}"


def tree(version: str, directory: Path, slugs=(), whole: bool = False) -> Path:
    """A copy of the release (or of its files that patches touch) with these patches applied in their order."""
    origin = source(version)
    files = ["verl"] if whole else sorted({file for slug in series(version) for file in touched(version, slug)})
    for name in files:
        if (origin / name).is_dir():
            shutil.copytree(origin / name, directory / name)
        else:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin / name, directory / name)
    for slug in slugs:
        git_apply(directory, version, slug)
    return directory


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
