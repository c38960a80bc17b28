"""verl v0.7.0, checkpoint engine on NPU: the device id of a process, from what npu-smi and the environment say."""

import subprocess
from types import SimpleNamespace

import pytest

from ci.tests.contract import patched

SLUG = "derive-npu-uuid-from-visible-devices"
FILE = "recipe/fully_async_policy/checkpoint_engine.py"
PID = 2317
FAILED = 215  # what npu-smi returned for a card that the container does not have


def listing(npu_ids, chip_count=1):
    """`npu-smi info -l`."""
    card = "\n        NPU ID                         : {}\n        Chip Count                     : {}\n"
    cards = "".join(card.format(npu_id, chip_count) for npu_id in npu_ids)
    return f"        Card Count                     : {len(npu_ids)}\n{cards}"


def proc_mem(npu_id, chips, wide, memory):
    """`npu-smi info -t proc-mem -i ID`: per chip its processes, then its id. `wide`: one field a line."""
    text = (f"        NPU ID                         : {npu_id}\n"
            f"        Chip Count                     : {len(chips)}\n\n")
    for chip_id, pids in enumerate(chips):
        for pid in pids:
            if wide:
                text += (f"        Process id                     : {pid}\n        Process name                   : "
                         f"python3\n        Process memory(MB)             : {memory}\n")
            else:
                text += f"        Process id:{pid}        Process name:python3        Process memory(MB):{memory}\n"
        text += "" if pids else "        No process in device.\n"
        text += f"        Chip ID                        : {chip_id}\n\n"
    return text


class Hangs(Exception):
    """A call without a timeout that would never come back."""


class Host:
    """A machine (or container) whose npu-smi knows the given cards: {npu id: [pids of chip 0, pids of chip 1]}."""

    def __init__(self, cards=None, listed=None, installed=True, wide=False, memory=51890, hangs=(), says=None):
        self.cards, self.listed, self.installed = cards or {}, listed, installed
        self.wide, self.memory, self.hangs, self.says = wide, memory, hangs, says
        self.CalledProcessError, self.SubprocessError = subprocess.CalledProcessError, subprocess.SubprocessError

    def run(self, command, check, capture_output, text, errors="strict", timeout=None):
        assert command[:2] == ["npu-smi", "info"] and check and capture_output and text
        if not self.installed:
            raise FileNotFoundError("npu-smi")
        if command[-1] in self.hangs:
            if timeout is None:
                raise Hangs
            raise subprocess.TimeoutExpired(command, timeout)
        if self.says is not None:
            return SimpleNamespace(stdout=self.says.decode(errors=errors))
        if command[2:] == ["-l"]:
            chip_count = max(map(len, self.cards.values()), default=1)
            return SimpleNamespace(stdout=listing(self.cards if self.listed is None else self.listed, chip_count))
        assert command[2:5] == ["-t", "proc-mem", "-i"]
        if int(command[5]) not in self.cards:
            raise subprocess.CalledProcessError(FAILED, command)
        npu_id = int(command[5])
        return SimpleNamespace(stdout=proc_mem(npu_id, self.cards[npu_id], self.wide, self.memory))


@pytest.fixture(scope="module")
def device_of(tmp_path_factory):
    """Calls the checkpoint engine's own function, patched or not; returns what follows the address."""
    roots = {slugs: patched.tree("verl", "v0.7.0", list(slugs), tmp_path_factory.mktemp("recipe"), also=(FILE,))
             for slugs in ((), (SLUG,))}

    def call(host, visible=None, index=0, slugs=(SLUG,)):
        environment = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
        device = SimpleNamespace(current_device=lambda: index)
        module = patched.load(roots[slugs] / FILE, "checkpoint_engine", {
            "subprocess": host, "os": SimpleNamespace(getpid=lambda: PID, getenv=environment.get),
            "ray.util.collective": patched.Upstream(),
            "verl.utils.device": patched.Upstream(get_device_name=lambda: "npu", get_torch_device=lambda: device)})
        module.get_ip = lambda: "10.0.0.1"
        address, _, found = module._get_physical_device_id(index).removeprefix("NPU-").rpartition("-")
        assert address == "10.0.0.1"
        return found

    return call


def one_chip(ids, busy, pid=PID):
    return {i: [[pid] if i == busy else [90000 + i]] for i in ids}


NOT_RUNNING = "not running on the npu device"
# name: (host, ASCEND_RT_VISIBLE_DEVICES, index of the device in the process, expected id, what upstream says)
CASES = {
    "whole-server": (Host(one_chip(range(8), 5)), None, 0, "5", "5"),
    "one-field-a-line": (Host(one_chip(range(8), 5), wide=True), None, 0, "5", "5"),
    "subset-of-cards": (Host(one_chip((4, 5, 6, 7), 6)), None, 0, "6", ValueError),
    "two-cards": (Host(one_chip((0, 1), 1)), None, 0, "1", "1"),
    "two-cards-on-neither": (Host(one_chip((0, 1), None)), "1", 0, "1", ValueError),
    "sixteen-cards": (Host(one_chip(range(16), 13)), None, 0, "13", ValueError),
    "a3-first-chip": (Host({0: [[1], [2]], 3: [[PID], [4]]}), None, 0, "6", ValueError),
    "a3-second-chip": (Host({i: [[10 + i], [PID if i == 3 else 50 + i]] for i in range(8)}), None, 0, "7", "7"),
    "a3-subset": (Host({i: [[10 + i], [PID if i == 7 else 50 + i]] for i in (6, 7)}), None, 0, "15", ValueError),
    "a3-many-processes": (Host({0: [[1, 2, 3], [4, PID, 5]]}), None, 0, "1", "1"),
    "card-refuses": (Host(one_chip((0, 2), 2), listed=(0, 1, 2)), None, 0, "2", ValueError),
    "a-part-of-another-pid": (Host({0: [[10 * PID]], 1: [[PID]]}, wide=True), None, 0, "1", "0"),
    "memory-looks-like-the-pid": (Host({0: [[1]], 1: [[PID]]}, memory=PID), None, 0, "1", "0"),
    "own-pid-namespace": (Host(one_chip((4, 5), None)), "5", 0, "5", ValueError),
    "own-pid-namespace-all-visible": (Host(one_chip((4, 5), None)), "4, 5", 1, "5", ValueError),
    "driver-hangs": (Host(one_chip((0, 1), 1), hangs=("-l",)), "0,1", 1, "1", "1"),
    "one-card-hangs": (Host(one_chip((0, 1), 1), hangs=("0",)), None, 0, "1", Hangs),
    "all-hang": (Host(one_chip((4, 5), 5), hangs=("-l", "0", "4", "5")), "4,5", 1, "5", Hangs),
    "garbage": (Host(says=b"| NPU ID : ? | Process id:2317 Chip ID"), "2,3", 1, "3", AttributeError),
    "bytes-that-are-no-text": (Host(says=b"\xff\xfe\x00NPU"), "2,3", 0, "2", UnicodeDecodeError),
    "silence": (Host(says=b""), "6", 0, "6", ValueError),
    "no-npu-smi": (Host(installed=False), "11", 0, "11", FileNotFoundError),
}


@pytest.mark.parametrize("name", CASES)
def test_the_device_of_the_process(device_of, name):
    host, visible, index, expected, _ = CASES[name]
    assert device_of(host, visible, index) == expected


@pytest.mark.parametrize("name", CASES)
def test_what_upstream_says(device_of, name):
    """Negative control: upstream finds the device only among ids 0..7, by a text that may be something else."""
    host, visible, index, _, upstream = CASES[name]
    if isinstance(upstream, str):
        assert device_of(host, visible, index, slugs=()) == upstream
    else:
        with pytest.raises(upstream):
            device_of(host, visible, index, slugs=())


@pytest.mark.parametrize("host, visible, index", [
    (Host(one_chip((4, 5), None)), None, 0), (Host(one_chip((4, 5), None)), "", 0),
    (Host(one_chip((4, 5), None)), "4,5", 2), (Host(installed=False), None, 0), (Host({}), None, 0),
    (Host(says=b"\xff"), None, 0)])
def test_nothing_matches(device_of, host, visible, index):
    with pytest.raises(ValueError, match=NOT_RUNNING) as error:
        device_of(host, visible, index)
    message = str(error.value)
    assert f"pid {PID}" in message and "\n" not in message and f"device {index}." in message
    assert str(sorted(host.cards)) in message and "ASCEND_RT_VISIBLE_DEVICES" in message


@pytest.mark.parametrize("chip_count, npu_ids", [(1, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (2, range(8)), (2, (6, 7)),
                                                 (1, range(16))])
def test_no_two_processes_share_an_id(device_of, chip_count, npu_ids):
    found = set()
    for busy in npu_ids:
        for chip in range(chip_count):
            cards = {i: [[PID] if (i, c) == (busy, chip) else [70000 + i] for c in range(chip_count)] for i in npu_ids}
            found.add(device_of(Host(cards)))
    assert found == {str(i * chip_count + c) for i in npu_ids for c in range(chip_count)}
