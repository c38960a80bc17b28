"""Unpacks the offline bundle beside this file: python unpack.py DEST [--parts DIR]

Verifies each part, unpacks all of them into DEST/site, DEST/esgrpo and DEST/wheels, compiles byte code on all cores,
and says how to run. Run it again after a part was missing or damaged: verified parts are not read twice, and a finished
DEST is left alone. A DEST/site, DEST/esgrpo or DEST/wheels that it did not make is never touched. Needs the host's
Python only.
"""

import argparse
import compileall
import hashlib
import json
import lzma
import os
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

DONE, BEGUN = ".bundle-unpacked", ".bundle-begun"
MADE = ("site", "esgrpo", "wheels")  # what an unpacking makes, and may delete if an earlier one made it


def fail(found, wanted, todo):
    sys.exit(f"esgrpo: bundle: {found} | wanted {wanted} | nothing can run from here | {todo}")


class Parts:
    """The parts as one stream."""

    def __init__(self, paths):
        self._files = [open(path, "rb") for path in paths]

    def read(self, size=-1):
        while self._files:
            data = self._files[0].read(size)
            if data:
                return data
            self._files.pop(0).close()
        return b""


def verify(manifest, directory, dest):
    """Paths of all parts; a part that was verified before is known by its size and time."""
    memory = dest / ".bundle-verified.json"
    known = json.loads(memory.read_text()) if memory.exists() else {}
    paths, bad = [], []
    for part in manifest["parts"]:
        path = directory / part["name"]
        paths.append(path)
        if not path.exists():
            bad.append(f"{part['name']} missing")
            continue
        stamp = [part["sha256"], path.stat().st_size, path.stat().st_mtime_ns]
        if known.get(part["name"]) == stamp:
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() != part["sha256"]:
            bad.append(f"{part['name']} damaged")
            continue
        known[part["name"]] = stamp
    memory.write_text(json.dumps(known))
    if bad:
        fail(", ".join(bad), "parts as listed in manifest.json", "copy them again and run the same command")
    return paths


def check_host(manifest):
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        fail(f"Python {python}", manifest["python"], f"run this with python{manifest['python']}")
    try:
        from importlib.metadata import version

        torch = version("torch").split("+")[0]
    except ImportError:
        torch = "not installed"
    if torch != manifest["torch"]:
        fail(f"torch {torch}", f"torch {manifest['torch']}", "the bundle's compiled parts are built for that torch")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--parts", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    manifest = json.loads((options.parts / "manifest.json").read_text())
    check_host(manifest)
    dest = options.dest.resolve()
    dest.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(json.dumps(manifest["parts"]).encode()).hexdigest()
    done = dest / DONE
    if not done.exists() or done.read_text() != identity:
        begun = dest / BEGUN
        foreign = [str(dest / name) for name in MADE if (dest / name).exists() or (dest / name).is_symlink()]
        if foreign and not (done.exists() or begun.exists()):
            fail(f"{' and '.join(foreign)} is there, and no unpacking made it", "a DEST without it",
                 "move it away, or give another DEST")
        paths = verify(manifest, options.parts, dest)
        begun.write_text(identity)
        done.unlink(missing_ok=True)
        for name in MADE:  # of an unpacking that was cut off, or of another bundle
            shutil.rmtree(dest / name, ignore_errors=True)
        with tarfile.open(fileobj=lzma.open(Parts(paths)), mode="r|") as tar:
            # Python has filters since 3.10.12 and 3.11.4; every byte of the archive was checked above
            tar.extractall(dest, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        compileall.compile_dir(dest / "site", quiet=2, workers=0)
        compileall.compile_dir(dest / "esgrpo", quiet=2, workers=0)
        done.write_text(identity)
        begun.unlink()
    path = os.pathsep.join(str(dest / name) for name in ("esgrpo/overlay", "esgrpo", "site"))
    print(f"export PYTHONPATH={path} VLLM_USE_FLASHINFER_SAMPLER=0")
    print("python -m esgrpo doctor   # what is still missing here")
    if (dest / "wheels").is_dir():
        print(f"python -m bench.pretrained --out DIR --wheels {shlex.quote(str(dest / 'wheels'))}   # model and tasks")


if __name__ == "__main__":
    main()
