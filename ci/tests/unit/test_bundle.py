"""The offline bundle: what goes in, and an unpacker that notices what is missing or damaged."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ci.bundle import __main__ as bundle

UNPACK = Path(bundle.__file__).with_name("unpack.py")
SETTINGS = bundle.tomllib.loads((bundle.HERE / "bundle.toml").read_text())
PART = 400  # bytes, so that a small archive has several parts


@pytest.mark.parametrize("name, inside", [
    ("vllm", True), ("nvidia-ml-py", True), ("nvidia-cublas", False), ("torch", False), ("flashinfer-python", False)])
def test_what_the_host_has_or_nobody_needs_stays_out(name, inside):
    assert bundle.wanted(name, SETTINGS) is inside


def test_the_lock_holds_what_is_asked_for_and_nothing_of_the_host():
    locked = dict(line.split("==") for line in bundle.LOCK.read_text().split())
    pins = dict(r.split("==") for r in SETTINGS["requirements"] if "==" in r)
    assert pins.items() <= locked.items()
    assert all(bundle.wanted(name, SETTINGS) for name in locked)


@pytest.fixture
def parts(tmp_path):
    """A bundle for the Python that runs the tests: one module, several parts."""
    source, out = tmp_path / "source", tmp_path / "parts"
    source.mkdir(), out.mkdir()
    (source / "module.py").write_text("ANSWER = 42  # " + hashlib.sha512(b"x").hexdigest() * 4 + "\n")
    archive = tmp_path / "all.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(source / "module.py", "site/module.py")
        for index in range(20):  # incompressible, or there would be one part only
            name = source / f"noise{index}"
            name.write_text(hashlib.sha256(str(index).encode()).hexdigest())
            tar.add(name, f"esgrpo/noise{index}")
    data, listed = archive.read_bytes(), []
    for number, start in enumerate(range(0, len(data), PART)):
        piece = data[start:start + PART]
        (out / f"part-{number:02d}").write_bytes(piece)
        listed.append({"name": f"part-{number:02d}", "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    assert len(listed) > 1
    (out / "manifest.json").write_text(json.dumps({
        "parts": listed, "python": ".".join(map(str, sys.version_info[:2])), "torch": "0.0"}))
    shutil.copy(UNPACK, out)
    return out


def unpack(parts, dest):
    """With a distribution `torch` 0.0 in front of any other."""
    fake = parts.parent / "host" / "torch-0.0.dist-info"
    fake.mkdir(parents=True, exist_ok=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0\n")
    return subprocess.run([sys.executable, str(parts / "unpack.py"), str(dest)], capture_output=True, text=True,
                          env={"PYTHONPATH": str(fake.parent)})


def test_unpacks_compiles_and_says_how_to_run(parts, tmp_path):
    dest = tmp_path / "with space"
    done = unpack(parts, dest)
    assert done.returncode == 0, done.stderr
    assert f"{dest}/esgrpo/overlay" in done.stdout and "esgrpo doctor" in done.stdout
    assert (dest / "site" / "module.py").exists() and list((dest / "site" / "__pycache__").glob("module.*.pyc"))
    before = (dest / "site" / "module.py").stat().st_ino
    assert unpack(parts, dest).returncode == 0 and (dest / "site" / "module.py").stat().st_ino == before


@pytest.mark.parametrize("damage, found", [
    (lambda part: part.write_bytes(b"y" + part.read_bytes()[1:]), "part-01 damaged"),
    (Path.unlink, "part-01 missing")])
def test_a_bad_part_is_named_and_a_second_try_goes_on(parts, tmp_path, damage, found):
    part, dest = parts / "part-01", tmp_path / "dest"
    good = part.read_bytes()
    damage(part)
    refused = unpack(parts, dest)
    assert refused.returncode == 1 and found in refused.stderr and refused.stderr.count("\n") == 1
    assert not (dest / "site").exists()
    part.write_bytes(good)
    assert unpack(parts, dest).returncode == 0


def test_wheels_of_a_model_come_along_and_the_host_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "XZ", (*bundle.XZ, "-0"))  # of the same files, in a tenth of the time
    wheel, out = tmp_path / "model-1-py3-none-any.whl", tmp_path / "parts"
    wheel.write_bytes(bytes(range(256)) * 4)
    (tmp_path / "tree").mkdir(), out.mkdir()
    (tmp_path / "tree" / "module.py").write_text("ANSWER = 42\n")
    manifest = bundle.pack(tmp_path / "tree", out, [wheel])
    assert all(part["bytes"] <= bundle.PART_BYTES < 49e6 for part in manifest["parts"])
    (out / "manifest.json").write_text(json.dumps({
        **manifest, "python": ".".join(map(str, sys.version_info[:2])), "torch": "0.0"}))
    shutil.copy(UNPACK, out)
    done = unpack(out, tmp_path / "dest")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dest" / "wheels" / wheel.name).read_bytes() == wheel.read_bytes()
    assert f"bench.pretrained --out DIR --wheels {tmp_path / 'dest' / 'wheels'}" in done.stdout


@pytest.mark.parametrize("name", ["site", "esgrpo", "wheels"])
def test_what_it_did_not_make_is_never_deleted(parts, tmp_path, name):
    mine = tmp_path / "dest" / name / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("work of a year")
    for _ in range(2):  # nor by a second try
        refused = unpack(parts, tmp_path / "dest")
        assert refused.returncode == 1 and str(mine.parent) in refused.stderr and refused.stderr.count("\n") == 1
        assert mine.read_text() == "work of a year"


def test_an_unpacking_that_was_cut_off_is_made_anew(parts, tmp_path):
    """Killed while it wrote: what it has made is its own. So is what another bundle's unpacking has made."""
    dest = tmp_path / "dest"
    assert unpack(parts, dest).returncode == 0
    (dest / ".bundle-unpacked").rename(dest / ".bundle-begun")
    (dest / "site" / "half.py").write_text("x =")
    assert unpack(parts, dest).returncode == 0
    assert not (dest / "site" / "half.py").exists() and not (dest / ".bundle-begun").exists()
    (dest / ".bundle-unpacked").write_text("another bundle")
    (dest / "site" / "old.py").write_text("")
    assert unpack(parts, dest).returncode == 0 and not (dest / "site" / "old.py").exists()


def test_another_torch_is_refused(parts, tmp_path):
    manifest = json.loads((parts / "manifest.json").read_text())
    (parts / "manifest.json").write_text(json.dumps({**manifest, "torch": "9.9"}))
    refused = unpack(parts, tmp_path / "dest")
    assert refused.returncode == 1 and "torch 0.0 | wanted torch 9.9" in refused.stderr
