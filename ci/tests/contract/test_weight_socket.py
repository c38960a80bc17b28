"""Two runs on one host, both the first job of a Ray cluster of their own: verl gives their weight sockets one name."""

import importlib.util
import os
import uuid

import pytest

from ci.tests.contract import patch_tree
from esgrpo.hooks.verl.fixes import weight_socket

FILE = "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"


@pytest.fixture(scope="module")
def transfer():
    """The real module by its file: its package asks for an installed distribution named vllm."""
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", patch_tree.source("0.9.1") / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def handle():
    """As verl names it, but for the job id: no real run may be disturbed."""
    return f"{weight_socket.PREFIX}{uuid.uuid4().hex[:8]}-replica-0-rank-0.sock"


@pytest.fixture
def hooked(monkeypatch, transfer):
    for name in weight_socket.CLASSES:
        cls = getattr(transfer, name)
        monkeypatch.setattr(cls, "__init__", cls.__init__)
    weight_socket.apply(transfer)
    assert weight_socket.installed(transfer)


def file_of(end) -> str:
    return end.zmq_handle.removeprefix("ipc://")


def bound(monkeypatch, transfer, handle, run):
    monkeypatch.setenv(weight_socket.ENV_RUN_ID, run)
    sender = transfer.BucketedWeightSender(zmq_handle=handle)
    sender._init_socket()
    return sender, os.stat(file_of(sender)).st_ino


def close(*senders):
    for sender in senders:
        sender.socket.close(linger=0)
        if os.path.exists(file_of(sender)):
            os.remove(file_of(sender))


def test_plain_verl_takes_the_other_runs_socket_away(monkeypatch, transfer, handle):
    first, before = bound(monkeypatch, transfer, handle, "one")
    second, _ = bound(monkeypatch, transfer, handle, "two")
    try:
        assert not weight_socket.installed(transfer)
        assert file_of(first) == file_of(second) and os.stat(file_of(first)).st_ino != before
    finally:
        close(first, second)


@pytest.mark.hook("weight-socket-of-this-run")
def test_each_run_keeps_its_own(monkeypatch, transfer, handle, hooked):
    first, before = bound(monkeypatch, transfer, handle, "one")
    second, _ = bound(monkeypatch, transfer, handle, "two")
    try:
        assert file_of(first) != file_of(second) and os.stat(file_of(first)).st_ino == before
    finally:
        close(first, second)


def test_both_ends_of_a_run_agree(monkeypatch, transfer, handle, hooked):
    monkeypatch.setenv(weight_socket.ENV_RUN_ID, "one")
    sender, receiver = transfer.BucketedWeightSender(handle), transfer.BucketedWeightReceiver(handle, device=None)
    assert sender.zmq_handle == receiver.zmq_handle == handle.replace("zmq-", "zmq-one-")


@pytest.mark.parametrize("address", ["ipc:///tmp/other.sock", "tcp://127.0.0.1:1"])
def test_what_is_named_in_another_way_stays(monkeypatch, address):
    monkeypatch.setenv(weight_socket.ENV_RUN_ID, "one")
    assert weight_socket.of_this_run(address) == address
    monkeypatch.delenv(weight_socket.ENV_RUN_ID)
    assert weight_socket.of_this_run(weight_socket.PREFIX + "x.sock") == weight_socket.PREFIX + "x.sock"
