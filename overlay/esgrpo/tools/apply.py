"""apply.sh: apply, reverse or look at the patch set of a source checkout. All or nothing, never fuzzy, no network.

Every file is patched in a staging directory inside the tree, checked against its recorded hash, and only then moved
into place. An interrupted run leaves each file either old or new; both are known states, so running again finishes it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from esgrpo.arguments import Parser
from esgrpo.errors import EsgrpoError, say, show
from esgrpo.tools import patchset
from esgrpo.tools.patchset import NO_FILE, PatchError, Survey

OK, USAGE, UNKNOWN, MODIFIED, NOT_APPLICABLE, MISMATCH = 0, 2, 3, 4, 5, 6
EXIT_CODES = """exit codes:
  0 done, or nothing to do       2 usage                                         3 unknown upstream
  4 touched files are modified   5 does not apply (a file is missing, ...)       6 hash mismatch, nothing was changed"""
STAGING = ".esgrpo-apply"
PACKAGE = Path(__file__).resolve().parents[1]
# a wheel carries them in the package, a checkout at its top
PATCHES = next((p for p in (PACKAGE / "patches", PACKAGE.parents[1] / "patches") if p.is_dir()), PACKAGE / "patches")
COMMAND = "python -m esgrpo.tools.apply" if PATCHES.parent == PACKAGE else "./apply.sh"


def git_apply(patch: Path, path: str, directory: Path, reverse: bool) -> None:
    """Apply one patch to one staged file with `git apply`: exact context, no fuzz, no three-way merge."""
    command = ["git", "apply", "--whitespace=nowarn", f"--include={path}", *(["--reverse"] if reverse else []),
               str(patch)]
    show("+ " + shlex.join(command))
    # the staging directory may lie in somebody's repository: git must not look for it
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent), "GIT_CONFIG_NOSYSTEM": "1",
                   "GIT_CONFIG_GLOBAL": os.devnull}
    environment.pop("GIT_DIR", None)
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise PatchError(patch.stem, (result.stderr.strip().splitlines() or ["no output"])[-1],
                         f"{path} to take the patch", "nothing was changed", "report this: its hash was right",
                         NOT_APPLICABLE)


def _refuse_unless_clean(found: Survey, slugs: list[str]) -> None:
    """Missing and modified files that the patches touch end the run before anything is staged."""
    name = found.patches.name
    touched = {path for p in found.patches.patches if p.slug in slugs for path in p.files}
    missing = [path for path in found.missing if path in touched]
    edited = {path: blob for path, blob in found.edited.items() if path in touched}
    if missing:
        raise PatchError(name, f"{', '.join(missing)} missing", "every touched file", "nothing was changed",
                         "use a git checkout: this distribution does not carry the file", NOT_APPLICABLE)
    if edited:
        crlf = sorted(path for path, blob in edited.items() if blob == "CRLF")
        todo = ("git config core.autocrlf false, then check the files out again" if crlf
                else "git stash or restore them; --status lists the state of each patch")
        what = f"CRLF line ends in {', '.join(crlf)}" if crlf else f"modified: {', '.join(sorted(edited))}"
        raise PatchError(name, what, "the hashes in UPSTREAM", "nothing was changed", todo, MODIFIED)


def _target(found: Survey, slugs: list[str], reverse: bool) -> dict[str, frozenset[str]]:
    """For each file that must change, the slugs that it is to have afterwards."""
    chosen = frozenset(slugs)
    goal = {}
    for path, having in found.applied.items():
        mine = chosen & {p.slug for p in found.patches.touching(path)}
        wanted = having - mine if reverse else having | mine
        if wanted == having:
            continue
        if found.patches.hash_of(path, wanted) is None:
            raise PatchError(found.patches.name, f"{path} with only {', '.join(sorted(wanted)) or 'no patch'}",
                             "a combination in UPSTREAM", "nothing was changed",
                             "these patches build on one another: name the others in --only too", NOT_APPLICABLE)
        goal[path] = wanted
    for patch in found.patches.patches:
        if not reverse and patch.slug in chosen:
            clash = [c for c in patch.listed("Conflicts") if c in chosen or found.state(c) == "applied"]
            if clash:
                raise PatchError(patch.slug, f"{', '.join(clash)} as well", "one of the two", "nothing was changed",
                                 "choose with --only", NOT_APPLICABLE)
    return goal


def _stage(found: Survey, goal: dict[str, frozenset[str]], tree: Path, staging: Path) -> None:
    """Patched copies of the files in `staging`, each with its recorded hash."""
    for path, wanted in goal.items():
        having = found.applied[path]
        copy = staging / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (tree / path).exists():
            shutil.copy2(tree / path, copy)
        touching = found.patches.touching(path)
        # back to the first patch that differs, then forward: the same order as the series
        first = next(i for i, p in enumerate(touching) if (p.slug in having) != (p.slug in wanted))
        for patch in reversed(touching[first:]):
            if patch.slug in having:
                git_apply(patch.path, path, staging, reverse=True)
        for patch in touching[first:]:
            if patch.slug in wanted:
                git_apply(patch.path, path, staging, reverse=False)
        result = patchset.blob_hash(copy.read_bytes()) if copy.exists() else NO_FILE
        if result != found.patches.hash_of(path, wanted):
            raise PatchError(found.patches.name, f"{path} is {result}", str(found.patches.hash_of(path, wanted)),
                             "nothing was changed", "the patch set is damaged: restore patches/", MISMATCH)


@contextlib.contextmanager
def _staging(tree: Path, inside: bool):
    """A directory to patch in: inside the tree when files will be moved (same file system), else a temporary one."""
    if not inside:
        with tempfile.TemporaryDirectory(prefix="esgrpo-check-") as name:
            yield Path(name)
        return
    staging = tree / STAGING
    try:
        shutil.rmtree(staging, ignore_errors=True)  # left by an interrupted run
        staging.mkdir()
    except OSError as error:
        raise PatchError(str(tree), error.strerror or str(error), "a writable tree", "nothing was changed",
                         "copy the checkout, or make it writable", NOT_APPLICABLE) from None
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replaceable(tree: Path, paths) -> None:
    """Refuses what cannot be replaced as it is: links, since a link may lead into somebody else's tree, and what
    is read-only."""
    root = tree.resolve()
    links = {path: (tree / path).resolve() for path in paths if (tree / path).resolve() != root / path}
    if links:
        what = ", ".join(f"{path} is a link to {target}" for path, target in links.items())
        raise PatchError(str(tree), what, "files of this tree", "nothing was changed",
                         "patch the tree that it leads to, or a copy without links (cp -rL)", NOT_APPLICABLE)
    blocked = [p for p in paths if (tree / p).exists() and not os.access(tree / p, os.W_OK)
               or not os.access(_existing(tree / p), os.W_OK)]
    blocked += [] if os.access(tree, os.W_OK) else [str(tree)]  # the staging directory lies in it
    if blocked:
        raise PatchError(str(tree), f"{', '.join(blocked)} is read-only", "a writable tree", "nothing was changed",
                         "make it writable, or copy the checkout", NOT_APPLICABLE)


def _existing(path: Path) -> Path:
    """The nearest directory above `path` that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def _keep_owner_and_mode(new: Path, old: Path) -> None:
    """git writes 644 or 755, and as whoever runs it; the file stays what it was."""
    if old.exists():
        before = old.stat()
        if (before.st_uid, before.st_gid) != (new.stat().st_uid, new.stat().st_gid):
            with contextlib.suppress(OSError):  # only root can give files away
                os.chown(new, before.st_uid, before.st_gid)
        os.chmod(new, stat.S_IMODE(before.st_mode))


def change(found: Survey, tree: Path, slugs: list[str], *, reverse: bool, check: bool) -> int:
    """Apply or reverse `slugs`; `check` only tries. Returns the number of files that differ. Raises PatchError."""
    _refuse_unless_clean(found, slugs)
    goal = _target(found, slugs, reverse)
    if not goal:
        return 0
    _replaceable(tree, goal)
    with _staging(tree, inside=not check) as staging:
        _stage(found, goal, tree, staging)
        if not check:
            for path in goal:
                new, old = staging / path, tree / path
                if new.exists():
                    _keep_owner_and_mode(new, old)
                    old.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new, old)
                else:
                    old.unlink()
    return len(goal)


def _print_status(found: Survey) -> None:
    show(f"{found.patches.name}: {found.series_state}")
    width = max(map(len, found.patches.slugs))
    for slug in found.patches.slugs:
        show(f"  {slug:<{width}}  {found.state(slug)}")
    for path, blob in found.edited.items():
        show(f"  {path}: {'CRLF line ends' if blob == 'CRLF' else 'edited, blob ' + blob}")
    for path in found.missing:
        show(f"  {path}: missing")


def _print_list(sets) -> None:
    for patches in sets:
        show(f"{patches.name} ({patches.facts.get('commit', 'no commit')})")
        for patch in patches.patches:
            hook = patch.header["Hook"]
            show(f"  {patch.slug}: {patch.header['Why']}" + ("" if hook == "none" else f" [hook {hook}]"))


def _tree(options) -> Path:
    if options.installed:
        import importlib.util

        name = options.checkout or "verl"
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            raise PatchError("--installed", f"{name} is not importable by {sys.executable}", "an installed upstream",
                             "nothing was changed", "activate its environment", USAGE)
        return Path(spec.origin).parent.parent
    if options.checkout is None:
        raise PatchError("apply.sh", "no CHECKOUT", "the root of a checkout", "nothing was changed",
                         f"{COMMAND} --help", USAGE)
    tree = Path(options.checkout)
    if not tree.is_dir():
        raise PatchError("apply.sh", f"{tree} is no directory", "the root of a checkout", "nothing was changed",
                         "correct the path", USAGE)
    return tree.resolve()


def _chosen(found: Survey, only: str | None) -> list[str]:
    if only is None:
        return found.patches.slugs
    slugs = [slug.strip() for slug in only.split(",") if slug.strip()]
    unknown = sorted(set(slugs) - set(found.patches.slugs))
    if unknown or not slugs:
        raise PatchError("--only", ", ".join(unknown) or "nothing", ", ".join(found.patches.slugs),
                         "nothing was changed", "correct the slug", USAGE)
    return slugs


def parser() -> Parser:
    top = Parser(prog=COMMAND, description=__doc__.splitlines()[0], epilog=EXIT_CODES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    action = top.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say whether it would apply; change nothing")
    action.add_argument("--status", action="store_true", help="pristine | applied | edited | partial, per patch")
    action.add_argument("--reverse", action="store_true", help="take the patches out again")
    action.add_argument("--list", action="store_true", help="list every patch set")
    top.add_argument("--only", metavar="SLUG,...", help="these patches instead of the whole series")
    top.add_argument("--installed", action="store_true", help="the installed package (verl, or the one named) instead")
    top.add_argument("checkout", nargs="?", metavar="CHECKOUT", help="root of a checkout, sdist or site-packages")
    return top


def act(options) -> None:
    sets = patchset.load_all(PATCHES)
    if not sets:
        raise PatchError("apply.sh", f"no patch set in {PATCHES}", "the patches of a checkout or a wheel of esgrpo",
                         "nothing was changed", "run ./apply.sh of a checkout of this project", USAGE)
    if options.list:
        return _print_list(sets)
    tree = _tree(options)
    found = patchset.identify(sets, tree)
    if options.status:
        return _print_status(found)
    slugs = _chosen(found, options.only)
    show(f"esgrpo: {found.patches.name} at {tree}: {found.series_state}")
    changed = change(found, tree, slugs, reverse=options.reverse, check=options.check)
    if options.check:
        show(f"esgrpo: applies: {changed} files would change; next: {COMMAND} {shlex.quote(str(tree))}")
        return None
    state = patchset.survey(found.patches, tree).series_state
    done = "taken out" if options.reverse else "applied"
    what = f"{len(slugs)} patches {done}, {changed} files changed" if changed else f"nothing to do, all {done} before"
    show(f"esgrpo: {what}; the tree is {state}")
    hooks = [p.slug for p in found.patches.patches if p.slug in slugs and p.header["Hook"] != "none"]
    if hooks and not options.reverse:
        show(f"esgrpo: the overlay cures {', '.join(hooks)} at run time too; it sees the patch and reports NOT_NEEDED")
    if not options.reverse:
        show("esgrpo: next: start the run with `esgrpo run -- ...`; `esgrpo status` shows each hook in this tree")
    return None


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)  # exits with 2 on wrong usage
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if shutil.which("git") is None:
        say("esgrpo: apply.sh: git is missing | wanted git on PATH | nothing was changed | install git")
        return USAGE
    try:
        act(options)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return OK
    except BrokenPipeError:  # `apply.sh --status | head`: the interpreter flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except PatchError as error:
        say(error)
        return error.code
    except EsgrpoError as error:
        say(error)
        return USAGE
    except KeyboardInterrupt:
        say("esgrpo: apply.sh: interrupted | every file is old or new, none is half | run again to finish, or "
            "--reverse")
        return 130


if __name__ == "__main__":
    sys.exit(main())
