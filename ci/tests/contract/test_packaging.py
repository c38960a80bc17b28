"""Wheel and editable installs into fresh virtual environments, and the overlay in an environment without upstreams."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PYENV = Path.home() / ".pyenv" / "versions"
SOURCES = ("setup.py", "setup.cfg", "pyproject.toml", "LICENSE", "README.md", "overlay", "patches")
ASK = "import sys; print('esgrpo.engine' in sys.modules and sys.modules['esgrpo.engine']._booted)"
FINGERPRINTS = ("from esgrpo import engine, recorded; hooks = [r.hook for r in engine.load_hooks().values()]; "
                "print(all(h.unguarded or recorded.of_hook(h).fingerprints for h in hooks) and len(hooks) > 1)")


def other_pythons() -> list[str]:
    """Supported interpreters beside the running one; `pip install` of a wheel does not differ otherwise."""
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return [str(path) for minor in ("3.10", "3.11", "3.12") if minor != running
            for path in sorted(PYENV.glob(f"{minor}.*/bin/python"))[-1:]]


def command(*arguments, **variables) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ESGRPO_") and k != "PYTHONPATH"}
    return subprocess.run([str(a) for a in arguments], env={**environment, **variables}, capture_output=True,
                          text=True, timeout=300, cwd="/")


def checked(*arguments, **variables) -> str:
    done = command(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory, root):
    """A copy: building must not leave egg-info and build/ in the working tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif (root / name).exists():
            shutil.copy(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """Built once, without isolation where this environment can build."""
    directory = tmp_path_factory.mktemp("wheel")
    checked(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation(), "--wheel-dir", directory,
            source)
    return next(directory.glob("esgrpo-*.whl"))


def isolation() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ["--no-build-isolation"] if int(version("setuptools").split(".")[0]) >= 64 else []
    except PackageNotFoundError:
        return []


def fresh(directory: Path, python: str = sys.executable) -> Path:
    """Python of a new virtual environment; pip comes from this environment, which is faster than a bundled one."""
    if python == sys.executable:
        venv.create(directory, with_pip=False, symlinks=True)
    else:
        checked(python, "-m", "venv", "--without-pip", directory)
    return directory / "bin" / "python"


def install(python: Path, *arguments) -> None:
    checked(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments)


def assert_works(python: Path) -> None:
    """The .pth loads the overlay when enabled and only then; the console script and `-m` agree."""
    assert checked(python, "-c", ASK) == "False\n"
    assert checked(python, "-c", ASK, ESGRPO_ENABLE="0") == "False\n"
    assert checked(python, "-c", ASK, ESGRPO_ENABLE="1") == "True\n"
    assert checked(python, "-c", ASK, ESGRPO_ENABLE="1", ESGRPO_PREFIX="/another") == "False\n"
    script = python.parent / "esgrpo"
    rows = json.loads(checked(script, "status", "--json"))
    assert rows and rows == json.loads(checked(python, "-m", "esgrpo", "status", "--json"))
    assert checked(python, "-c", FINGERPRINTS) == "True\n"
    assert checked(script, "run", "--", python, "-c", ASK) == "True\n"
    assert command(script, "run").returncode == 2
    empty = command(script, "doctor", "--log", os.devnull)
    assert (empty.returncode, empty.stdout.partition(":")[0]) == (6, "empty")
    assert {"python", "hooks"} <= {row["name"] for row in json.loads(command(script, "doctor", "--json").stdout)}
    broken = command(python, "-c", "print('goes on')", ESGRPO_ENABLE="1", PYTHONPATH=str(stub(python)))
    assert broken.stdout == "goes on\n" and broken.stderr.count("\n") == 1, broken.stderr


def test_a_second_build_holds_nothing_of_the_first(source, tmp_path):
    """pip install --upgrade in a checkout builds where it built before; a hook that has moved would be there twice."""
    tree = Path(shutil.copytree(source, tmp_path / "tree"))
    moved, built = tree / "overlay" / "esgrpo" / "moved.py", tree / "build" / "lib" / "esgrpo"
    build = f"import os, runpy, sys; os.chdir({str(tree)!r}); sys.argv = ['setup.py', '-q', 'build']; "
    moved.write_text("")
    checked(sys.executable, "-c", f"{build}runpy.run_path('setup.py')")
    assert (built / "moved.py").exists()
    moved.unlink()
    checked(sys.executable, "-c", f"{build}runpy.run_path('setup.py')")
    assert not (built / "moved.py").exists()
    assert (built / "engine.py").exists() and (built / "patches").is_dir() and (built.parent / "esgrpo.pth").exists()


SHOW = "import os; print(os.environ.get('PYTHONPATH'))"


def test_run_of_an_installed_esgrpo_leaves_the_path_alone(wheel, source, tmp_path):
    """site-packages on PYTHONPATH would be in front of another Python's own modules, and of the standard library."""
    inside = fresh(tmp_path / "venv")
    install(inside, wheel)
    run = (inside.parent / "esgrpo", "run", "--", inside, "-c")
    assert checked(*run, SHOW) == "None\n" and checked(*run, SHOW, PYTHONPATH="/else") == "/else\n"
    assert checked(*run, ASK) == "True\n"
    target = tmp_path / "target"
    install(inside, "--target", target, wheel)
    refused = command(inside, "-m", "esgrpo", "run", "--", inside, "-c", SHOW, PYTHONPATH=str(target))
    assert refused.returncode == 2 and "esgrpo.pth" in refused.stderr and refused.stderr.count("\n") == 1
    install(inside, "-e", source)
    assert checked(*run, SHOW) == f"{source / 'overlay'}\n" and checked(*run, ASK) == "True\n"


def stub(python: Path) -> Path:
    """A directory with a wrapt that cannot be imported."""
    directory = python.parent / "stub"
    directory.mkdir(exist_ok=True)
    (directory / "wrapt.py").write_text("raise ImportError('broken')\n")
    return directory


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()], ids=lambda p: Path(p).parts[-3])
def test_wheel_install(wheel, tmp_path, python):
    inside = fresh(tmp_path / "venv", python)
    install(inside, wheel)
    assert_works(inside)
    listed = checked(inside, "-m", "esgrpo.tools.apply", "--list")
    assert "verl v0.9.1" in listed and "  resume-without-sleep: " in listed
    checked(sys.executable, "-m", "pip", "--python", inside, "uninstall", "--yes", "--quiet", "esgrpo")
    assert not list((tmp_path / "venv").rglob("esgrpo*"))
    assert command(inside, "-c", ASK, ESGRPO_ENABLE="1").stderr == ""


def test_editable_install(source, tmp_path):
    inside = fresh(tmp_path / "venv")
    install(inside, "-e", source)  # with isolation: pip builds with the target's interpreter, which has no setuptools
    assert_works(inside)
    found = checked(inside, "-c", "import esgrpo; print(esgrpo.__file__)").strip()
    assert found == str(source / "overlay" / "esgrpo" / "__init__.py")
    checked(sys.executable, "-m", "pip", "--python", inside, "uninstall", "--yes", "--quiet", "esgrpo")
    assert not list((tmp_path / "venv").rglob("*esgrpo*"))


def names(path: Path) -> tuple[set[str], str]:
    with zipfile.ZipFile(path) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        return set(archive.namelist()), archive.read(record).decode()


def test_the_wheel_holds_the_package_and_its_pth(wheel):
    files, record = names(wheel)
    assert {"esgrpo.pth", "esgrpo/engine.py", "esgrpo/hooks/verl/run/driver_start.py"} <= files
    assert "sitecustomize.py" not in files  # it would shadow every other one in site-packages
    assert not any(name.startswith(("ci/", "bench/")) for name in files)
    assert all(name in record for name in files)


def test_every_package_is_in_the_wheel(wheel, root):
    files = names(wheel)[0]
    package = root / "overlay" / "esgrpo"
    for path in (*package.rglob("*.py"), *package.rglob("*.toml")):
        assert path.relative_to(root / "overlay").as_posix() in files


def test_the_patches_are_in_the_wheel(wheel, root):
    files = names(wheel)[0]
    for path in (path for path in (root / "patches").rglob("*") if path.is_file()):
        assert f"esgrpo/patches/{path.relative_to(root / 'patches').as_posix()}" in files


def test_the_editable_wheel_records_its_pth(source, tmp_path):
    """An installer that goes by RECORD would leave the file behind on uninstall."""
    script = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files, record = names(next(tmp_path.glob("*.whl")))
    assert "esgrpo.pth" in files and "esgrpo.pth" in record


def test_status_in_an_environment_without_upstreams(tmp_path, overlay):
    """Only wrapt and packaging: every hook is listed with a state that needs no upstream, and a reason."""
    from esgrpo import engine

    inside = fresh(tmp_path / "venv")
    install(inside, "wrapt", "packaging")
    rows = json.loads(checked(inside, "-m", "esgrpo", "status", "--json", PYTHONPATH=overlay))
    assert [row["slug"] for row in rows] == list(engine.load_hooks())
    assert {row["state"] for row in rows} <= {"ABSENT", "NOT_NEEDED"} and all(row["reason"] for row in rows)
    assert {row["upstream"] for row in rows if row["state"] == "ABSENT"} == {"verl"}  # needed without any feature
    every_feature = ",".join(sorted({name for record in engine.load_hooks().values() for name in record.hook.features}
                                    - {"cpu", "npu"}))
    needed = set()  # a run has one platform: each turns the hooks of the others off
    for platform in ("cpu", "huawei"):
        rows = json.loads(checked(inside, "-m", "esgrpo", "status", "--json", PYTHONPATH=overlay,
                                  VERL_PLATFORM=platform, ESGRPO_FEATURES=every_feature))
        needed |= {row["slug"] for row in rows if row["state"] == "ABSENT"}
    assert needed == {row["slug"] for row in rows if row["upstream"] != "python"}
