"""A training prompt that says its own number of responses, through verl's real _run_prompt; and without the hook."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.groups import followed_members, rollout_driver  # noqa: E402
from esgrpo.hooks.verl.v1.rows import group_size  # noqa: E402
from esgrpo.records import flush, read  # noqa: E402

pytestmark = pytest.mark.slow
N = 8


def outcome(queue, monkeypatch, tmp_path, prompts: dict, hooked: bool = True, validate: bool = False):
    """Prompts `group -> what it says` run side by side; returns (their statuses, groups that never ended, rows)."""
    import ray.actor  # noqa: F401
    import transfer_queue
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    monkeypatch.setenv("ESGRPO_SEGMENT", '{"enable": true}')
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    real = AgentLoopWorkerTQ.__ray_metadata__.modified_class

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name="", trace=True, **kwargs):
        await asyncio.sleep(0)

    async def async_kv_put(key, partition_id, tag):
        queue.tags[key] = tag

    monkeypatch.setattr(transfer_queue, "async_kv_put", async_kv_put)
    rollout = SimpleNamespace(n=N, response_length=64, val_kwargs=SimpleNamespace(n=N))
    run_loop = wrapped(followed_members, _run_agent_loop)
    run_prompt = wrapped(group_size, real._run_prompt) if hooked else real._run_prompt
    worker = SimpleNamespace(rollout_config=rollout, llm_client=object(),
                             config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    worker._run_agent_loop = lambda *args, **kwargs: run_loop(worker, *args, **kwargs)

    async def scene():
        await asyncio.gather(*(run_prompt(worker, {"uid": uid, "raw_prompt": uid, **said}, {},
                                          {"validate": validate}) for uid, said in prompts.items()))
        return rollout_driver.of_worker(worker, 64).runs.groups

    left = asyncio.run(scene())
    assert flush()
    return {uid: queue.tags[uid]["status"] for uid in prompts}, list(left), read(str(tmp_path), "responses")


SAID = {"more": {"__rollout_n__": 9}, "fewer": {"__rollout_n__": 4}, "none": {}}


@pytest.mark.hook("v1-group-size")
def test_a_group_is_as_large_as_its_prompt_says(queue, monkeypatch, tmp_path):
    statuses, left, rows = outcome(queue, monkeypatch, tmp_path, SAID)
    assert set(statuses.values()) == {"finished"} and not left
    assert {uid: sum(row["group"] == uid for row in rows) for uid in SAID} == {"more": 9, "fewer": 4, "none": N}


def test_without_the_hook_a_larger_group_fails_and_a_smaller_one_never_ends(queue, monkeypatch, tmp_path):
    statuses, left, _ = outcome(queue, monkeypatch, tmp_path, SAID, hooked=False)
    assert statuses["more"] == "failure" and left == ["fewer"]


def test_validation_is_not_followed(queue, monkeypatch, tmp_path):
    statuses, left, rows = outcome(queue, monkeypatch, tmp_path, {"val": {"__rollout_n__": 3}}, validate=True)
    assert statuses == {"val": "finished"} and not left and not rows


@pytest.mark.parametrize("said", ["four", 4.0, None])
def test_a_size_that_is_none_fails_its_prompt_alone_as_verl_has_it(queue, monkeypatch, tmp_path, said):
    prompts = {"bad": {"__rollout_n__": said}, "good": {}}
    statuses, left, rows = outcome(queue, monkeypatch, tmp_path, prompts)
    assert statuses == {"bad": "failure", "good": "finished"} and not left and len(rows) == N
