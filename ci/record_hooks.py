"""Records which source of an upstream each hook is tested with, in hooks/fingerprints/UPSTREAM.toml.

    python -m ci.record_hooks verl==0.9.2                    what changed for which hook; records what did not change
    python -m ci.record_hooks verl==0.9.2 --accept SLUG      ... and this hook's new source, which you have read
    python -m ci.record_hooks vllm --accept NEW-SLUG         a new hook, in every release that has a contract row
    python -m ci.record_hooks                                drops what is recorded of hooks that are gone

Of a changed hook that is not named the difference is printed, nothing is recorded, and the exit code is 1. An accepted
hook is looked for in the other releases, too, and recorded where its source is one that was accepted. A release in
which all hooks are recorded becomes supported, and gets its row in compat.toml if its matrix cell passes here. The
tables that count hooks are written again (bench.docs).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from packaging.requirements import Requirement  # noqa: E402

from bench import docs  # noqa: E402
from ci.matrix import cells  # noqa: E402
from esgrpo import compat, engine, fingerprint, recorded, releases  # noqa: E402
from esgrpo.errors import EsgrpoError  # noqa: E402
from esgrpo.recorded import Recorded  # noqa: E402
from esgrpo.tools import apply, drift, patchset, upstreams  # noqa: E402

HEADER = "# Written by `python -m ci.record_hooks`; what it means is said in esgrpo/recorded.py.\n"
WIDTH = 120
MAXIMUM_PATCHES = 4  # of a set: each subset is looked at, 16 trees; of a larger set only the whole series is
SERIES = "series"
WITH_CELLS = ("verl", "vllm")  # whose contract cell is evidence for the hooks; Ray's looks at its pickling


def text_of(upstream: recorded.Upstream) -> str:
    """The file's content: hooks sorted by slug, fingerprints by the oldest release that has them."""
    lines = [HEADER, f"{recorded.SUPPORTED} = {_list(upstream.supported)}\n"]
    for slug in sorted(upstream.hooks):
        entry = upstream.hooks[slug]
        lines += [f"\n[{slug}]\n", *_rows("", entry.fingerprints), *_rows(f"{recorded.CURED}.", entry.cured)]
    return "".join(lines)


def _rows(prefix: str, by_release: dict[str, str]) -> list[str]:
    by_fingerprint: dict[str, list[str]] = {}
    for release in sorted(by_release, key=recorded.order_of):
        by_fingerprint.setdefault(by_release[release], []).append(release)
    rows = []
    for found, having in by_fingerprint.items():
        row = f"{prefix}{found} = {_list(having)}"
        rows.append((row if len(row) <= WIDTH else f"{prefix}{found} = {_list(having, ',' + chr(10) + '    ')}") + "\n")
    return rows


def _list(words, comma: str = ", ") -> str:
    return f"[{comma.join(f'{chr(34)}{word}{chr(34)}' for word in words)}]"


@dataclass
class Seen:
    """What the trees of one release have for one hook: tree name ("" or "+slug.slug") -> joint, or target's own."""

    joint: dict[str, str] = field(default_factory=dict)
    target: dict[str, str] = field(default_factory=dict)  # where a patch of the hook's own slug is applied
    missing: str = ""

    def names(self) -> dict[str, str]:
        return {**self.joint, **self.target}


def look(hooks: list[engine.Hook], version: str, tree: Path, patches: patchset.PatchSet | None) -> dict[str, Seen]:
    """The hooks' fingerprints in the release, and in each patched checkout of it that differs for a hook."""
    seen = {hook.slug: Seen() for hook in hooks}
    for slugs, root in _trees(tree, patches):
        whole = patches is not None and slugs == tuple(patches.slugs)
        name = "+" + (SERIES if whole and len(slugs) > 1 else ".".join(slugs)) if slugs else ""
        for hook in hooks:
            presumed = engine.presumed_patches(hook, version)
            if presumed and not whole:
                continue
            _look_at(hook, "" if presumed else name, slugs, root, seen[hook.slug])
    return seen


def _look_at(hook: engine.Hook, name: str, slugs: tuple[str, ...], root: Path, seen: Seen) -> None:
    own = hook.slug in slugs
    found, missing = fingerprint.of_targets((hook.target,) if own else (hook.target, *hook.relies_on), [str(root)])
    if found is None:
        seen.missing = seen.missing or missing
    elif found not in (seen.target if own else seen.joint).values():  # the smallest set of patches that makes it
        (seen.target if own else seen.joint)[name] = found


def _trees(tree: Path, patches: patchset.PatchSet | None) -> Iterator[tuple[tuple[str, ...], Path]]:
    """(slugs, root): the release, then each subset of its patches; one root is patched and reversed in turn."""
    yield (), tree
    if patches is None:
        return
    sizes = range(1, len(patches.slugs) + 1) if len(patches.slugs) <= MAXIMUM_PATCHES else [len(patches.slugs)]
    with tempfile.TemporaryDirectory(prefix="esgrpo-record-") as name:
        root = Path(name) / "tree"
        shutil.copytree(tree, root)
        for slugs in itertools.chain.from_iterable(itertools.combinations(patches.slugs, size) for size in sizes):
            _change(patches, root, slugs, reverse=False)
            yield slugs, root
            _change(patches, root, slugs, reverse=True)


def _change(patches: patchset.PatchSet, root: Path, slugs: tuple[str, ...], reverse: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # the git commands
        apply.change(patchset.survey(patches, root), root, list(slugs), reverse=reverse, check=False)
    fingerprint._tree.cache_clear()  # two changes within a tick of the file system's clock look the same


class Recorder:
    """What one call does to the file of one upstream."""

    def __init__(self, upstream: str, accept: set[str], *, accept_all: bool = False, cured: frozenset = frozenset(),
                 every_release: bool = False, say=print):
        self.upstream, self.accept, self.accept_all, self.cured, self.say = upstream, accept, accept_all, cured, say
        self.every_release, self.shown = every_release, set()
        old = recorded.of_upstream(upstream)
        self.hooks = drift.guarded_hooks(upstream)
        slugs = {hook.slug for hook in self.hooks}
        self.supported, self.entries = list(old.supported), {s: e for s, e in old.hooks.items() if s in slugs}
        for slug in sorted(old.hooks.keys() - slugs):
            say(f"dropped: {slug} (no such hook)")
        self.rows = sorted({row.versions[upstream] for row in compat.load()
                            if row.level == "contract" and upstream in row.versions}, key=recorded.order_of)

    def release(self, version: str, tree: Path | None = None, only: set[str] | None = None) -> list[str]:
        """Record this release; `only` these hooks, and nothing but known sources. Returns what was refused.

        Where every release is meant, a hook that was never tested in this one is no refusal.
        """
        tree = tree or upstreams.sources(self.upstream, version, self.say)
        hooks = [hook for hook in self.hooks if only is None or hook.slug in only]
        having = [hook for hook in hooks if not engine.has_no_place(hook, version)]
        for hook in hooks:
            if hook not in having and hook.slug in self.entries:
                self._store(hook.slug, version, Seen())
        directory = cells.directory_of(self.upstream, version)
        seen = look(having, version, tree, patchset.load(directory) if directory else None)
        counts, refused = dict.fromkeys(("unchanged", "accepted", "not tested there"), 0), []
        for hook in having:
            what = self._judge(hook, version, tree, seen[hook.slug], sweep=only is not None)
            counts[what] = counts.get(what, 0) + 1
            refused += [hook.slug] * (what == "refused")
        if only is None:
            self.say(f"{self.upstream} {version}: {', '.join(f'{count} {what}' for what, count in counts.items())}, "
                     f"{len(hooks) - len(having)} without a place in it")
            if not refused and not counts["not tested there"]:
                self._becomes_supported(version)
        return refused

    def _judge(self, hook: engine.Hook, version: str, tree: Path, seen: Seen, sweep: bool) -> str:
        entry = self.entries.get(hook.slug, Recorded())
        if hook.slug in self.cured and not sweep:
            found = fingerprint.of_targets((hook.target,), [str(tree)])[0]
            self.entries[hook.slug] = Recorded(entry.fingerprints, {**entry.cured, version: found})
            self.say(f"{hook.slug}: {self.upstream} {version} does its work itself, {found}")
            return "accepted"
        known = {*entry.fingerprints.values(), *entry.cured.values()}
        if seen.joint.get("") in entry.cured.values() or set(seen.names().values()) <= known and "" in seen.joint:
            self._store(hook.slug, version, seen)
            return "unchanged"
        if sweep:
            return "not tested there"
        named = hook.slug in self.accept or self.accept_all
        verdict = "accepted" if named and "" in seen.joint else "refused"
        if not named and self.every_release and entry.fingerprints and version not in entry.fingerprints:
            return "not tested there"
        self._show(hook, version, tree, seen, verdict)
        if verdict == "accepted":
            self._store(hook.slug, version, seen)
        return verdict

    def _show(self, hook: engine.Hook, version: str, tree: Path, seen: Seen, verdict: str) -> None:
        what = f"{seen.missing} is missing" if "" not in seen.joint else f"new source {seen.joint['']}"
        self.say(f"{hook.slug}: {self.upstream} {version}: {what}: {verdict}")
        known = self.entries.get(hook.slug, Recorded()).fingerprints
        for reference in drift.tested_references(known, version):
            with contextlib.suppress(upstreams.Unavailable):
                before = upstreams.sources(self.upstream, reference, self.say)
                for target in (hook.target, *hook.relies_on):
                    state, lines = drift.compare_target(target, before, tree, most=None)
                    if state != drift.UNCHANGED:
                        shown = (target, reference, version) in self.shown  # hooks share what they rely on
                        self.shown.add((target, reference, version))
                        self.say(f"  {target}: {state} since {reference}{', see above' * shown}")
                        for line in () if shown else lines:
                            self.say(f"    {line}")
                return

    def _store(self, slug: str, version: str, seen: Seen) -> None:
        """Replaces what is recorded of this hook at this release and its patched checkouts."""
        entry = self.entries.get(slug, Recorded())

        def elsewhere(table: dict[str, str]) -> dict[str, str]:
            return {name: found for name, found in table.items() if name.partition("+")[0] != version}

        cured_here = {name: found for name, found in entry.cured.items() if name == version}
        joint = {} if seen.joint.get("") in entry.cured.values() else seen.joint
        self.entries[slug] = Recorded(
            {**elsewhere(entry.fingerprints), **{version + name: found for name, found in joint.items()}},
            {**elsewhere(entry.cured), **cured_here, **{version + name: found for name, found in seen.target.items()}})

    def sweep(self, done: list[str]) -> None:
        """Accepted hooks in the other releases that have a row: recorded where the source is one that was accepted."""
        accepted = {hook.slug for hook in self.hooks if hook.slug in self.accept or self.accept_all}
        for version in self.rows if accepted else ():
            if version not in done:
                try:
                    self.release(version, only=accepted)
                except upstreams.Unavailable as error:
                    self.say(f"not looked at: {error}")

    def write(self) -> None:
        content = recorded.Upstream(tuple(self.supported), {s: e for s, e in self.entries.items()
                                                            if e.fingerprints or e.cured})
        recorded.path_of(self.upstream).write_text(text_of(content), encoding="utf-8")
        recorded.of_upstream.cache_clear()

    def _becomes_supported(self, version: str) -> None:
        if not recorded.is_supported(self.upstream, version):
            self.supported.append(f"=={version}")
            self.say(f"{self.upstream} {version} is a supported release now")


def add_row(upstream: str, version: str, say=print) -> None:
    """The contract row of a release that has none, when its cell passes here; then all that is generated from it."""
    versions = {upstream: version, "python": "{}.{}".format(*sys.version_info)}
    if upstream == "vllm":
        versions = {upstream: version, "torch": compat.installed()["torch"], "python": versions["python"]}
    row = compat.Tested("contract", datetime.date.today().isoformat(), versions)
    if upstream not in WITH_CELLS or row.cell in {known.cell for known in compat.load()}:
        return
    outcome = cells.KINDS[cells.kind_of(row)].run(row)
    say(f"{row.cell}: {outcome.state}: {'; '.join(outcome.evidence[:1])}")
    if outcome.state != cells.PASS:
        return
    lines = [f'level = "{row.level}"', f"date = {row.date}", *(f'{name} = "{v}"' for name, v in versions.items())]
    with compat.FILE.open("a", encoding="utf-8") as file:
        file.write("\n[[tested]]\n" + "\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.record_hooks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="*", help="NAME==VERSION, or NAME for every release with a contract row")
    parser.add_argument("--accept", nargs="+", default=[], metavar="SLUG", help="hooks whose new source you have read")
    parser.add_argument("--accept-all", action="store_true", help="every hook whose target is there; each is printed")
    parser.add_argument("--cured", nargs="+", default=[], metavar="SLUG",
                        help="hooks whose work the release does itself")
    parser.add_argument("--tree", type=Path, help="unpacked sources of the one release that is named")
    options = parser.parse_args(argv)
    try:
        return _record(options)
    except EsgrpoError as error:
        print(error, file=sys.stderr)
        return drift.UNUSABLE


def _record(options) -> int:
    wanted: dict[str, list[str]] = {}
    for text in options.release:
        bare = not Requirement(text).specifier
        upstream, version = (text, "") if bare else drift.requirement(text)
        wanted.setdefault(upstream, []).extend([releases.public(version)] if version else [])
    known = {hook.slug: hook.upstream for hook in (r.hook for r in engine.load_hooks().values()) if not hook.unguarded}
    for slug in (*options.accept, *options.cured):
        if known.get(slug) not in wanted:
            raise EsgrpoError(slug, f"a hook of {known.get(slug, 'no upstream')}", f"a hook of {', '.join(wanted)}",
                              "nothing is recorded", "correct the slug, or name a release of its upstream")
    if options.tree and (len(wanted) != 1 or len(next(iter(wanted.values()))) != 1):
        raise EsgrpoError("--tree", f"{len(options.release)} releases", "one NAME==VERSION", "nothing is recorded",
                          "name the release that these sources are")
    refused = []
    for upstream in wanted or sorted(path.stem for path in recorded.DIRECTORY.glob("*.toml")):
        recorder = Recorder(upstream, set(options.accept), accept_all=options.accept_all,
                            cured=frozenset(options.cured), every_release=not wanted.get(upstream))
        versions = wanted.get(upstream, []) or (recorder.rows if wanted else [])
        for version in versions:
            refused += [f"{slug} at {upstream} {version}" for slug in recorder.release(version, options.tree)]
        recorder.sweep(versions)
        recorder.write()
        for version in () if refused or options.tree else versions:
            add_row(upstream, version)
    docs.main([])  # the table of releases counts hooks, the tox environments are its rows
    if refused:
        print(f"esgrpo: not recorded: {', '.join(refused)} | wanted sources that somebody has read | they do not act "
              "there | read the differences above, then --accept what holds", file=sys.stderr)
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
