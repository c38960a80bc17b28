"""The small adapters between vLLM releases, each on stand-ins of what a release has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from esgrpo import engine
from esgrpo.call import wrapped
from esgrpo.hooks.vllm import scheduler_cls, segment_mixin
from esgrpo.hooks.vllm.logprob_sums import LogprobSums


class Chosen:
    """Stands for the scheduler class that vLLM or Ascend chose."""


@pytest.fixture
def core(monkeypatch):
    module = ModuleType("vllm.v1.engine.core")
    module.resolve_obj_by_qualname = {"some.module.Chosen": Chosen}.__getitem__
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.hook("segment-scheduler-by-class")
@pytest.mark.parametrize("chosen", ["some.module.Chosen", Chosen])
@pytest.mark.parametrize("by_name", [False, True])
def test_by_class_the_mixin_enters_after_the_workers_have_started(core, chosen, by_name):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=chosen))
    seen = []

    def _initialize_kv_caches(self, vllm_config):
        seen.append(vllm_config.scheduler_config.scheduler_cls)
        return 7, 0, "kv"

    hooked = wrapped(scheduler_cls, _initialize_kv_caches)
    assert (hooked(None, vllm_config=config) if by_name else hooked(None, config)) == (7, 0, "kv")
    assert seen == [chosen]  # nothing that pickle cannot take was in the config while workers could start
    assert config.scheduler_config.scheduler_cls is segment_mixin.mixed_with(Chosen)
    hooked(None, config)
    assert config.scheduler_config.scheduler_cls is segment_mixin.mixed_with(Chosen)


@pytest.mark.parametrize("version, expected", [
    ("0.11.0", {"segment-scheduler-by-class"}), ("0.11.0rc1", {"segment-scheduler-by-class"}),
    ("0.12.0", {"segment-scheduler"}), ("0.33.0", {"segment-scheduler"}),
    ("unknown", {"segment-scheduler", "segment-scheduler-by-class"}),  # the fingerprint decides
])
def test_one_of_the_two_entries_has_a_place(version, expected):
    hooks = (engine.load_hooks()[slug].hook for slug in ("segment-scheduler", "segment-scheduler-by-class"))
    assert {hook.slug for hook in hooks if not engine.has_no_place(hook, version)} == expected


def lists(keys, sampled, rows):
    """A ModelRunnerOutput of vLLM 0.11: lists of floats, one row per request, no starts."""
    return SimpleNamespace(req_ids=list(keys), sampled_token_ids=[[1] * count for count in sampled],
                           req_id_to_index={key: index for index, key in enumerate(keys)},
                           logprobs=SimpleNamespace(logprobs=[[row] for row in rows]))


@pytest.mark.parametrize("sampled, expected", [([1, 1], (-1, -2)), ([0, 1], (0, -2)), ([3, 1], (-1, -2))])
def test_one_row_per_request_without_starts(sampled, expected):
    sums = LogprobSums()
    assert sums.add(lists("ab", sampled, [-1, -2]), {"a": 3, "b": 1}, "ab") == sum(sampled)
    assert (sums.pop("a"), sums.pop("b")) == expected


@pytest.mark.parametrize("sampled", [[1, 1], [2, 1]])
def test_dropped_output_of_a_living_request_does_not_count(sampled):
    sums = LogprobSums()
    sums.add(lists("ab", [1, 1], [-1, -2]), {"a": 1, "b": 1}, "ab")
    sums.ended("a", 2)
    assert sums.add(lists("ab", sampled, [-4, -8]), {"a": 2, "b": 1}, "ab") == 1
    assert sums.add(lists("ab", [1, 1], [-16, -32]), {"a": 1, "b": 1}, "ab") == 2
    assert (sums.pop("a"), sums.pop("b"), sums._late) == (-17, -42, {})


@pytest.mark.parametrize("fields, drops", [
    ({}, False), ({"discard_latest_async_tokens": True}, True), ({"async_tokens_to_discard": 0}, False),
    ({"async_tokens_to_discard": 1}, True), ({"drop_stale_output": True, "num_stale_output_tokens": 1}, True),
    ({"drop_stale_output": True, "num_stale_output_tokens": 0}, False),
    ({"drop_stale_output": False, "num_stale_output_tokens": 1}, False)])
def test_what_a_release_says_about_output_in_flight(fields, drops):
    assert segment_mixin._drops_output(SimpleNamespace(**fields)) == drops


class Upstream:
    """As much of a scheduler as a cache reset needs."""

    def __init__(self, requests):
        self.requests = requests

    def reset_prefix_cache(self, reset_running_requests=False):
        for request in self.requests.values():
            request.discard_latest_async_tokens = True  # vLLM 0.12 to 0.20: whether or not anything is in flight
        return True


def test_a_reset_drops_only_what_is_in_flight():
    """Negative control: upstream alone leaves the flag on both, and loses a token of the second."""
    requests = {"flying": SimpleNamespace(), "landed": SimpleNamespace()}
    scheduler = object.__new__(segment_mixin.mixed_with(Upstream))
    Upstream.__init__(scheduler, requests)
    scheduler.segment_flight, scheduler.segment_logprobs = [{"flying": 1}], LogprobSums()
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert {key: request.discard_latest_async_tokens for key, request in requests.items()} == {
        "flying": True, "landed": False}
    assert scheduler.segment_logprobs._late == {"flying": 1}
