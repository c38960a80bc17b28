"""How busy accelerators are: what drivers say is read, averaged between rows, or missing with a reason."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from ci.tests.unit.test_doctor_environment import npu_smi
from esgrpo import records, utilisation

WAIT_S = 20.0


def busy(text: str, *shares: int) -> str:
    """The same text with other AICore shares, chip by chip."""
    parts = text.split("| 0          0  / 0 ")
    return "".join(part if not number else f"| {shares[number - 1]:<10} 0  / 0 {part}"
                   for number, part in enumerate(parts))


@pytest.mark.parametrize("text, wanted", [
    (busy(npu_smi((0, 1)), 97, 3), {"0": (0.97, 3373 / 65536), "1": (0.03, 3373 / 65536)}),
    (busy(npu_smi((4, 7)), 100, 0), {"4": (1.0, 3373 / 65536), "7": (0.0, 3373 / 65536)}),
    (busy(npu_smi((3,), chips=2), 50, 60), {"6": (0.5, 3373 / 65536), "7": (0.6, 3373 / 65536)}),
    (npu_smi((0,)).replace("3373 / 65536", "0    / 0    "), {}), ("dcmi module initialize failed", {}), ("", {})])
def test_what_npu_smi_says(text, wanted):
    assert utilisation.parse_npu_smi(text) == wanted


def test_npu_smi_that_fails_is_a_reason(monkeypatch):
    for outcome, wanted in ((SimpleNamespace(stdout="", stderr="dcmi failed"), "dcmi failed"),
                            (subprocess.TimeoutExpired("npu-smi", 20), "timed out"), (OSError("gone"), "gone")):
        def run(*_args, outcome=outcome, **_kwargs):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(subprocess, "run", run)
        with pytest.raises(utilisation.Missing, match=wanted):
            utilisation.npu_smi()()


class Nvml:
    """What we use of pynvml, for two devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, refuses: str = ""):
        self.refuses = refuses

    def __getattr__(self, name):
        answers = {"nvmlInit": None, "nvmlDeviceGetCount": 2,
                   "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=25),
                   "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10, total=40)}

        def call(*arguments):
            if name == self.refuses:
                raise self.NVMLError("Not Supported")
            return arguments[0] if name == "nvmlDeviceGetHandleByIndex" else answers[name]

        return call


def test_nvml_by_pynvml_or_by_the_copy_that_vllm_has_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert utilisation.nvml()() == {"0": (0.25, 0.25), "1": (0.25, 0.25)}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "vllm.third_party.pynvml", raising=False)
    with pytest.raises(utilisation.Missing, match="nvidia-ml-py"):
        utilisation.nvml()
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", Nvml("nvmlDeviceGetUtilizationRates"))
    with pytest.raises(utilisation.Missing, match="Not Supported"):
        utilisation.nvml()()
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", Nvml("nvmlInit"))
    with pytest.raises(utilisation.Missing, match="Not Supported"):
        utilisation.nvml()


def test_means_between_two_rows_and_the_reason_once_there_are_none():
    given, asked = iter([{"0": (0.2, 0.5), "1": (1.0, 0.5)}, {"0": (0.4, 0.7), "1": (1.0, 0.5)}]), threading.Event()

    def sample():
        found = next(given, None)
        if found is None:
            asked.set()
            raise utilisation.Missing("gone")
        return found

    sampler = utilisation.Sampler(lambda: (sample, 0.01))
    assert sampler.take() == {"devices": {}, "no_devices": "not sampled yet"}
    assert asked.wait(WAIT_S)
    assert sampler.take(["0"]) == {"devices": {f"{records.NODE}:0": pytest.approx([0.3, 0.6])}, "no_devices": ""}
    while (told := sampler.take())["no_devices"] != "gone":  # the thread says it after its last sample
        assert told["devices"] == {}


def test_a_driver_that_raises_anything_costs_the_numbers_alone():
    ended = threading.Event()

    def found():
        ended.set()
        raise OSError("libnvidia-ml.so.1")

    sampler = utilisation.Sampler(found)
    sampler.take()
    assert ended.wait(WAIT_S)
    while "libnvidia-ml" not in sampler.take()["no_devices"]:
        pass


@pytest.mark.parametrize("environment, wanted", [
    ({}, None), ({"CUDA_VISIBLE_DEVICES": "0, 3"}, ["0", "3"]), ({"ASCEND_RT_VISIBLE_DEVICES": "7"}, ["7"]),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}, None), ({"CUDA_VISIBLE_DEVICES": ""}, None)])
def test_devices_of_a_process(monkeypatch, environment, wanted):
    for name in utilisation.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert utilisation.visible() == wanted
