"""Patch sets for source checkouts: their format, and what state a tree is in.

patches/<upstream>/<tag>/ holds UPSTREAM, series and one <slug>.patch per cause. UPSTREAM records the git blob hash of
every touched file under every subset of the patches that touch it. So the state of any tree (git checkout, sdist,
unpacked wheel, site-packages) follows from hashes alone: no git, no guessing, and after applying there is always a
hash that the result must have.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from esgrpo.errors import EsgrpoError

FIELDS = ("Slug", "Target", "Process", "Kind", "Why", "Invariant", "Applies", "Fixed-In", "Upstream-Status",
          "Remove-When", "Debt", "Conflicts", "Rebinds", "Hook", "Test")
KINDS = ("wrap", "replace", "add")
DEBTS = ("temporary", "adaptation")
_STATUS = re.compile(r"^(Pending|(Submitted|Backport|Denied|Inappropriate) \S.*)$")
_SLUG = re.compile(r"^[a-z]+(-[a-z]+)+$")
_DIFF = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
NO_FILE = "0" * 40  # git's hash of a file that is not there
NONE = "-"  # in UPSTREAM: no patch of the series


class PatchError(EsgrpoError):
    """A patch set that breaks the format, or a tree that it does not fit. `code` is apply.sh's exit code."""

    def __init__(self, who, found, wanted, consequence, todo, code: int = 2):
        super().__init__(who, found, wanted, consequence, todo)
        self.code = code

    def __reduce__(self):
        return type(self), (*self.args, self.code)


@dataclass(frozen=True)
class Patch:
    """One cause: the header fields, the touched files (in the order of the diff) and the file itself."""

    path: Path
    header: dict[str, str]
    files: tuple[str, ...]

    @property
    def slug(self) -> str:
        return self.header["Slug"]

    def listed(self, name: str) -> list[str]:
        """A comma-separated field; "none" is the empty list."""
        value = self.header[name]
        return [] if value == "none" else [item.strip() for item in value.split(",")]


@dataclass(frozen=True)
class PatchSet:
    """The patches of one upstream release. `blobs` is path -> blob hash -> slugs applied to that file."""

    directory: Path
    facts: dict[str, str]
    patches: tuple[Patch, ...]
    blobs: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.directory.parent.name} {self.directory.name}"

    @property
    def slugs(self) -> list[str]:
        return [patch.slug for patch in self.patches]

    def touching(self, path: str) -> list[Patch]:
        return [patch for patch in self.patches if path in patch.files]

    def hash_of(self, path: str, slugs: frozenset[str]) -> str | None:
        """Blob hash of `path` under a subset of the patches that touch it; None when this subset cannot be had."""
        return next((blob for blob, applied in self.blobs[path].items() if applied == slugs), None)


@dataclass(frozen=True)
class Survey:
    """What a tree is: for every touched file the slugs it has, or why that is unknown."""

    patches: PatchSet
    applied: dict[str, frozenset[str]]
    edited: dict[str, str]  # path -> blob hash that no patch of ours explains, or "CRLF"
    missing: tuple[str, ...]

    @property
    def known(self) -> int:
        return len(self.applied)

    def state(self, slug: str) -> str:
        """pristine | applied | partial | edited, of one patch."""
        files = next(p.files for p in self.patches.patches if p.slug == slug)
        if any(path in self.edited or path in self.missing for path in files):
            return "edited"
        having = [slug in self.applied[path] for path in files]
        return "applied" if all(having) else "partial" if any(having) else "pristine"

    @property
    def series_state(self) -> str:
        states = {self.state(slug) for slug in self.patches.slugs}
        return "edited" if "edited" in states else states.pop() if len(states) == 1 else "partial"


def blob_hash(data: bytes) -> str:
    """git's object id of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _wrong(path: Path, line: int, rule: str, found: str, expected: str) -> PatchError:
    return PatchError(f"{path}:{line}", f"{rule}: {found!r}", expected, "the patch set is not used", "correct the file")


def parse(path: Path) -> Patch:
    """One .patch file. Raises PatchError naming file, line and rule."""
    text = path.read_text(encoding="utf-8")
    head, separator, diff = text.partition("\n---\n")
    if not separator:
        raise _wrong(path, 1, "separator", text[:40], "header fields, a line `---`, the diff")
    header: dict[str, str] = {}
    for number, line in enumerate(head.splitlines(), 1):
        name, colon, value = line.partition(": ")
        if line.startswith("  ") and header:
            last = next(reversed(header))
            header[last] += " " + line.strip()
        elif colon and len(header) < len(FIELDS) and name == FIELDS[len(header)]:
            header[name] = value.strip()
        else:
            wanted = FIELDS[len(header)] if len(header) < len(FIELDS) else "`---`"
            raise _wrong(path, number, "field order", line, wanted)
    lines = head.count("\n") + 1
    if len(header) < len(FIELDS):
        raise _wrong(path, lines, "missing field", "---", FIELDS[len(header)])
    named = header["Slug"] == path.stem and bool(_SLUG.match(path.stem))
    rules = ((named, "Slug", "the file's name, words with dashes"),
             (header["Kind"] in KINDS, "Kind", " | ".join(KINDS)), (header["Debt"] in DEBTS, "Debt", " | ".join(DEBTS)),
             (bool(_STATUS.match(header["Upstream-Status"])), "Upstream-Status",
              "Pending | Submitted URL | Backport VERSION | Denied WHY | Inappropriate WHY"),
             (all(header.values()), next((k for k, v in header.items() if not v), ""), "a value"))
    for good, name, wanted in rules:
        if not good:
            raise _wrong(path, list(header).index(name) + 1, name, header[name], wanted)
    files = tuple(after for _, after in _DIFF.findall(diff))
    if not files or not diff.endswith("\n") or "\r" in diff:
        raise _wrong(path, lines + 1, "diff", diff[:40], "`git diff --full-index` with LF line ends")
    return Patch(path, header, files)


def read_upstream(path: Path) -> tuple[dict[str, str], dict[str, dict[str, frozenset[str]]]]:
    facts: dict[str, str] = {}
    blobs: dict[str, dict[str, frozenset[str]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("blob "):
            try:
                _, blob, name, slugs = line.split(" ")
            except ValueError:
                raise _wrong(path, number, "blob", line, "blob HASH PATH SLUG,SLUG|-") from None
            blobs.setdefault(name, {})[blob] = frozenset() if slugs == NONE else frozenset(slugs.split(","))
        elif ": " in line:
            key, _, value = line.partition(": ")
            facts[key] = value
        elif line:
            raise _wrong(path, number, "line", line, "`key: value` or `blob ...`")
    return facts, blobs


def series_of(directory: Path) -> list[str]:
    """Slugs in the order of application."""
    lines = (directory / "series").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def load(directory: Path, recorded: bool = True) -> PatchSet:
    """A patch set from its directory; `recorded=False` before UPSTREAM exists."""
    patches = tuple(parse(directory / f"{slug}.patch") for slug in series_of(directory))
    stray = sorted({p.stem for p in directory.glob("*.patch")} - {p.slug for p in patches})
    if stray:
        raise PatchError(str(directory / "series"), f"no line for {', '.join(stray)}", "every patch in the series",
                         "the patch set is not used", "add the slug or delete the file")
    facts, blobs = read_upstream(directory / "UPSTREAM") if recorded else ({}, {})
    result = PatchSet(directory, facts, patches, blobs)
    touched = {path for patch in patches for path in patch.files}
    if recorded and set(blobs) != touched:
        raise PatchError(str(directory / "UPSTREAM"), f"{sorted(set(blobs) ^ touched)} differ from the diffs",
                         "blob lines for each touched file", "the patch set is not used", "run ci/record_patches.py")
    return result


def load_all(root: Path) -> list[PatchSet]:
    """Every patch set under patches/, by name."""
    return [load(path.parent) for path in sorted(root.glob("*/*/UPSTREAM"))]


def survey(patches: PatchSet, tree: Path) -> Survey:
    """State of a tree, from the hashes of the touched files."""
    applied: dict[str, frozenset[str]] = {}
    edited: dict[str, str] = {}
    missing = []
    for path, states in patches.blobs.items():
        file = tree / path
        data = file.read_bytes() if file.is_file() else None
        found = NO_FILE if data is None else blob_hash(data)
        if found in states:
            applied[path] = states[found]
        elif data is None:
            missing.append(path)
        else:
            edited[path] = "CRLF" if blob_hash(data.replace(b"\r\n", b"\n")) in states else found
    return Survey(patches, applied, edited, tuple(missing))


def identify(sets: list[PatchSet], tree: Path) -> Survey:
    """The survey by the patch set that explains this tree best.

    Raises PatchError (code 3) when no touched file of any set is known.
    """
    surveys = [survey(patches, tree) for patches in sets]
    # a file that is absent before and after says nothing about who we look at
    evidence = [sum((tree / path).is_file() for path in found.applied) for found in surveys]
    best = max(range(len(surveys)), key=lambda i: (evidence[i] / max(len(surveys[i].patches.blobs), 1)), default=None)
    if best is None or evidence[best] == 0:
        raise PatchError(str(tree), "no file that a patch set touches has a known hash",
                         "one of " + ", ".join(p.name for p in sets), "nothing was changed",
                         "give the root of a pinned checkout (./apply.sh --list), or the site-packages of a wheel", 3)
    return surveys[best]
