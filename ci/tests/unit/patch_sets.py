"""A small upstream and a patch set for it, made on the spot: two files changed, one added."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILES = {"pkg/a.py": "".join(f"line_{i} = {i}\n" for i in range(40)), "pkg/b.py": "def b():\n    return 1\n"}
HEADER = {"Target": "pkg.a:line", "Process": "driver", "Kind": "replace", "Why": "it is wrong",
          "Invariant": "it is right", "Applies": "pkg ==1", "Fixed-In": "none", "Upstream-Status": "Pending",
          "Remove-When": "fixed", "Debt": "temporary", "Conflicts": "none", "Rebinds": "none",
          "Hook": "none", "Test": "none"}
# slug -> path -> (old, new); the last two touch neighbouring lines, so the second needs the first
CHANGES = {
    "change-first-line": {"pkg/a.py": ("line_1 = 1", "line_1 = -1"), "pkg/b.py": ("return 1", "return 2")},
    "add-new-file": {"pkg/c.py": ("", "c = 1\n")},
    "change-last-line": {"pkg/a.py": ("line_30 = 30", "line_30 = -30")},
    "build-on-that": {"pkg/a.py": ("line_30 = -30", "line_30 = -31")},
}


def write_tree(root: Path, newline: str = "\n") -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.replace("\n", newline).encode())
    return root


def header_text(slug: str, **changed: str) -> str:
    fields = {"Slug": slug, **HEADER, **{k.replace("_", "-"): v for k, v in changed.items()}}
    return "".join(f"{name}: {value}\n" for name, value in fields.items()) + "---\n"


def make(patches: Path, scratch: Path) -> Path:
    """patches/pkg/v1 with all of CHANGES, recorded; returns the directory."""
    def git(*arguments):
        return subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(scratch),
                               *arguments], check=True, capture_output=True, text=True).stdout

    write_tree(scratch)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "start")
    directory = patches / "pkg" / "v1"
    directory.mkdir(parents=True)
    for slug, files in CHANGES.items():
        for name, (old, new) in files.items():
            path = scratch / name
            path.write_text(path.read_text().replace(old, new, 1) if path.exists() else new)
        git("add", "-A")
        diff = git("diff", "--cached", "--full-index", "--no-renames")
        git("commit", "-qm", slug)
        (directory / f"{slug}.patch").write_text(header_text(slug) + diff)
    (directory / "series").write_text("\n".join(CHANGES) + "\n")
    pristine = write_tree(scratch.parent / "pristine")
    spec = importlib.util.spec_from_file_location("record_patches", ROOT / "ci" / "record_patches.py")
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    assert record.main([str(directory), "--tree", str(pristine), "--commit", "0" * 40]) == 0
    return directory
