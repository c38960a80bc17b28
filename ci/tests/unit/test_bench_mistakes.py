"""A user's mistake at a benchmark is one line of five parts and exit code 2, before anything is started or written."""

import errno
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.common import console
from esgrpo import cli

ROOT = Path(__file__).resolve().parents[3]
FIVE_PARTS = re.compile(r"esgrpo: [^|\n]+ \| wanted [^|\n]+ \| [^|\n]+ \| [^|\n]+\n")
TOY = "--replicas 2 --groups 4 --members 4 --cap 128 --scale 0.02 --updates 2"
# in a folder with the files `file` (text), `bytes` (no UTF-8), `empty.json` ({}), `list.json` and a directory `folder`
MISTAKES = [
    *(f"bench.docs --check --table {name}" for name in ("nosuch", "file", "bytes", "folder", "empty.json")),
    "bench.gains --figure folder", "bench.gains --figure file/x.png", "bench.gains --figure x.txt",
    "bench.gate folder --window -5", "bench.gate folder --window 0", "bench.gate folder --cut-below 2",
    "bench.gate nosuch", "bench.gate folder --results file/x", "bench.gate folder --results folder",
    "bench.verdict --orders -1", "bench.verdict --seeds x --results r", "bench.loops --results file/x",
    "bench.loops --placements 0", "bench.resolved --results file/x", "bench.startup --json file/x",
    *(f"bench.sim {TOY} {wrong}" for wrong in (
        "--replicas 0", "--replicas -1", "--groups 0", "--cap 0", "--updates 0", "--scale 0", "--scale nan",
        "--kv-tokens 0", "--kv-tokens 9", "--staleness -1", "--replay nosuch", "--replay bytes", "--replay list.json",
        "--replay short.jsonl", "--tau nosuch", "--tau folder", "--tau file", "--tau empty.json", "--tau list.json")),
    "bench.sim.study --parts bad", "bench.sim.study --seeds 1,x", "bench.sim.study --out folder",
    "bench.sim.validate nosuch", "bench.sim.validate empty.json", "bench.sim.validate bytes",
    "bench.sim.validate run.jsonl", "bench.sim.validate empty.json --tau list.json",
    "bench.sim.overlap --case nosuch", "bench.sim.overlap --groups 0", "bench.sim.null_groups --groups -3",
    "bench.sim.null_groups --results file/x", "bench.ablation --seeds x", "bench.ablation --jobs 0",
    "bench.ablation --budget -1", "bench.ablation --task nosuch --target 0.5", "bench.quickstart --budget -1",
    "bench.quickstart --out file/x", "bench.train --out file/x", "bench.train --history nosuch",
    "bench.train --model nosuch", "bench.train --model folder", "bench.train --task nosuch --target 0.5",
    "bench.overlap --measure-only --out out", "bench.overlap --half 0", "bench.restart --measure-only --out out",
    "bench.restart --results file/x", "bench.robustness --study modes --seeds x",
    "bench.engine --results r --updates 0",
    "bench.engine --results r --workload nosuch", "bench.engine --results r --workload short.jsonl",
    "bench.engine --results r --scenario nosuch", "bench.engine --results r --policies verl --model nosuch",
    "bench.engine.tau --out r --model nosuch", "bench.engine.tau --out r --contexts 0",
    "bench.testbed.make_data --out out --train -1", "bench.testbed.make_data --out file/x",
    "bench.testbed.train_model --out out --steps 0", "bench.testbed.train_model --out out --device nosuch",
    "bench.testbed.train_model --out out --hidden 3", "bench.testbed.record_groups --prompts 0",
    "bench.testbed.record_loops --out folder", "bench.testbed.grpo_check --model nosuch",
    "bench.testbed.statistics --samples 8", "bench.scheduler_cost --classes nosuch", "bench.output_cost --requests 0",
    "bench.output_cost --tokens 8 --rounds 8", "bench.prompt_sampling --prompts 10", "bench.gains --nosuch",
    "bench.estimator_bias --groups 3", "bench.estimator_bias --seeds 1", "bench.decode_overhead --windows 0",
    "bench.doctor_log --megabytes -1", "bench.prompt_sampling --json folder",
    "bench.pretrained.measure --model nosuch --prompts 0", "bench.pretrained.supervise --model x --out r --steps 0",
]


def code_of(main, arguments) -> int:
    try:
        return console.exit_code(main, arguments)
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("{text")
    (tmp_path / "bytes").write_bytes(b"\x80{")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "list.json").write_text("[1]\n")
    (tmp_path / "short.jsonl").write_text(4 * '{"prompt": 1, "tokens": 9, "correct": true}\n')
    (tmp_path / "run.jsonl").write_text('{"kind": "run", "workload": "math"}\n')
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def main_of(module: str):
    """Its `main`. Skipped for a library of others alone: a module of ours that cannot be imported is a defect."""
    try:
        return import_module(module).main
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("bench", "esgrpo", "ci"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(here, capsys, command):
    module, *arguments = command.split()
    kind = f"{module}.__main__" if module in ("bench.sim", "bench.engine") else module
    before = sorted(here.rglob("*"))
    main = main_of(kind)
    assert code_of(main, arguments) == 2
    assert FIVE_PARTS.fullmatch(said := capsys.readouterr().err), said
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("arguments, said", [
    (["nope"], "command line: name: invalid choice: 'nope' | wanted one of 'run', "), ([], "no name | wanted name"),
    (["top", "run", "--lang", "fr"], "top: --lang: invalid choice: 'fr' | wanted one of 'en', 'zh' | "),
    (["lint"], "lint: no script, NAME=VALUE | wanted script, "), (["explain", ""], "explain: no metric"),
    (["lint", "script.sh", "--verl", "nosuch/"], "lint: nosuch | wanted a directory with the package verl | ")])
def test_the_command_line_of_the_overlay_does_the_same(here, capsys, arguments, said):
    (here / "script.sh").write_text("python -m verl.trainer.main_ppo data.train_files=a\n")
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    line = capsys.readouterr().err
    assert code == 2 and FIVE_PARTS.fullmatch(line) and said in line, line


def raising(error: BaseException):
    def main(_argv):
        raise error

    return main


@pytest.mark.parametrize("error, code, said", [
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 2, "x: No such file or directory"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
    (json.JSONDecodeError("Expecting value", "{text", 1), 2, "Expecting value"),
    (KeyboardInterrupt(), 130, "interrupted")])
def test_what_the_user_can_cure_is_one_line(capsys, error, code, said):
    assert console.exit_code(raising(error)) == code
    line = capsys.readouterr().err
    assert FIVE_PARTS.fullmatch(line) and said in line


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), TypeError("x"), RuntimeError("x")])
def test_a_bug_of_ours_is_not_hidden(error):
    with pytest.raises(type(error)):
        console.exit_code(raising(error))


def test_every_command_ends_by_the_one_way():
    files = [path for path in ROOT.glob("bench/**/*.py") if '__name__ == "__main__"' in path.read_text("utf-8")]
    others = [path.name for path in files if "sys.exit(console.exit_code(main))" not in path.read_text("utf-8")]
    assert len(files) > 30 and others == ["prepare_data.py"]  # it runs by its path, without this package


def test_a_place_to_write_is_looked_at_before(here):
    assert console.output_file("new/below/x") == Path("new/below/x")
    assert console.output_file("file") == Path("file") and console.output_file(os.devnull) == Path(os.devnull)
    assert console.output_folder("folder") == Path("folder")
    if os.geteuid():
        (here / "folder").chmod(0o500)
        with pytest.raises(Exception, match="no directory that can be"):
            console.output_file("folder/x")


def test_a_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "bench.gains"], stdout=full, stderr=subprocess.PIPE, text=True,
                              cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'overlay'}:{ROOT}"}, timeout=60)
    assert done.returncode == 2 and FIVE_PARTS.fullmatch(done.stderr) and "No space left" in done.stderr


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["-h"], 0), (["--nosuch"], 2), (["--seed=1", "-x"], 2)])
def test_the_quickstart_installs_nothing_for_help_or_a_mistake(tmp_path, arguments, code):
    done = subprocess.run(["bash", str(ROOT / "bench" / "quickstart.sh"), *arguments], capture_output=True, text=True,
                          env={**os.environ, "ESGRPO_VENV": str(tmp_path / "venv")}, timeout=60)
    assert done.returncode == code and not (tmp_path / "venv").exists()
    assert FIVE_PARTS.fullmatch(done.stderr) if code else done.stdout.startswith("usage: bash bench/quickstart.sh")


def test_the_quickstart_knows_every_option_of_its_module(capsys):
    with pytest.raises(SystemExit):
        import_module("bench.quickstart").main(["--help"])
    options = set(re.findall(r"--\w+", capsys.readouterr().out)) - {"--help"}
    script = (ROOT / "bench" / "quickstart.sh").read_text("utf-8")
    assert options == set(re.findall(r"(--\w+)=\*", script)) and all(f"[{option} " in script for option in options)
