"""Writes the UPSTREAM file of a patch set: the hash of each touched file under every subset of its patches.

usage: python ci/record_patches.py patches/verl/v0.9.0 [--tree PRISTINE] [--git REPOSITORY] [--url URL] [--commit ID]
Without --tree the pristine sources are fetched as the matrix fetches them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from esgrpo.tools import apply, patchset, upstreams  # noqa: E402
from esgrpo.tools.patchset import NO_FILE, NONE, PatchError  # noqa: E402

MAXIMUM_PATCHES_A_FILE = 6  # 64 subsets


def states_of(path: str, touching, tree: Path) -> dict[str, tuple[str, ...]]:
    """Blob hash -> slugs, for every subset of the patches that applies exactly. Raises PatchError without the whole."""
    if len(touching) > MAXIMUM_PATCHES_A_FILE:
        raise PatchError(path, f"{len(touching)} patches", f"at most {MAXIMUM_PATCHES_A_FILE}", "not recorded",
                         "merge some")
    states = {}
    for size in range(len(touching) + 1):
        for subset in itertools.combinations(touching, size):
            try:
                blob = patched_hash(path, subset, tree)
            except PatchError:
                if size == len(touching):
                    raise
                continue
            slugs = tuple(patch.slug for patch in subset)
            if states.setdefault(blob, slugs) != slugs:
                raise PatchError(path, f"{slugs} and {states[blob]} give the same file", "patches that differ",
                                 "not recorded", "drop one")
    return states


def patched_hash(path: str, patches, tree: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / path
        copy.parent.mkdir(parents=True)
        if (tree / path).exists():
            shutil.copy(tree / path, copy)
        for patch in patches:
            apply.git_apply(patch.path.resolve(), path, Path(name), reverse=False)
        return patchset.blob_hash(copy.read_bytes()) if copy.exists() else NO_FILE


def git_trees(repository: str, commit: str, patches) -> tuple[str, str]:
    """git's tree hash of the commit, and the one that it has with the whole series; computed in a scratch index."""
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "GIT_INDEX_FILE": str(Path(name) / "index"),
                       "GIT_OBJECT_DIRECTORY": str(Path(name) / "objects"),
                       "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(Path(repository) / "objects")
                       if (Path(repository) / "objects").is_dir() else str(Path(repository) / ".git" / "objects")}
        Path(environment["GIT_OBJECT_DIRECTORY"]).mkdir()

        def git(*arguments: str) -> str:
            return subprocess.run(["git", "-C", repository, *arguments], env=environment, check=True, text=True,
                                  capture_output=True).stdout.strip()

        git("read-tree", commit)
        before = git("write-tree")
        for patch in patches:
            git("apply", "--cached", "--whitespace=nowarn", str(patch.path.resolve()))
        return before, git("write-tree")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    for option in ("--tree", "--git", "--url", "--commit"):
        parser.add_argument(option)
    options = parser.parse_args(argv)
    patches = patchset.load(options.directory, recorded=False)
    upstream, tag = options.directory.resolve().parent.name, options.directory.name
    file = options.directory / "UPSTREAM"
    old = patchset.read_upstream(file)[0] if file.exists() else {}
    facts = {"upstream": upstream, "tag": tag, "url": options.url or old.get("url", ""),
             "commit": options.commit or old.get("commit", "none")}
    tree = Path(options.tree) if options.tree else upstreams.sources(upstream, tag.removeprefix("v"))
    for key in ("tree", "tree-after"):
        if key in old:
            facts[key] = old[key]
    if options.git:
        facts["tree"], facts["tree-after"] = git_trees(options.git, facts["commit"], patches.patches)
    lines = [f"{key}: {value}" for key, value in facts.items()]
    for path in sorted({path for patch in patches.patches for path in patch.files}):
        for blob, slugs in states_of(path, patches.touching(path), tree).items():
            lines.append(f"blob {blob} {path} {','.join(slugs) or NONE}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"esgrpo: {file}: {len(patches.patches)} patches, {sum(line.startswith('blob') for line in lines)} states")
    return 0


if __name__ == "__main__":
    sys.exit(main())
