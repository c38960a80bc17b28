"""Fixtures of the tests on real upstream classes."""

import pytest


@pytest.fixture
def queue(monkeypatch):
    """verl's TransferQueue as a dictionary."""
    pytest.importorskip("transfer_queue")
    from ci.tests.contract.queue_stub import Queue

    return Queue(monkeypatch)
