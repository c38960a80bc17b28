"""On-policy distillation: verl asks the teacher inside _run_agent_loop, by a client of the member's own class.

verl's own worker, clients and teacher manager; servers, load balancers and the agent loop are scripts.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.property.rollout_fakes import TokenOutput  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.groups import attempt_places, client_attempts, followed_members, rollout_driver  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.hook("client-attempts", "attempt-places", "group-members")]
PROMPT, TOKENS, BUDGET = [1] * 4, 6, 16
TEACHERS = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
DOOMED = {"rule": "verdict", "prune": True, "keep_probability": 0.5, "reason": "coin", "tokens": 3, "pivot": None}
FOLLOWED = {"tokens": TOKENS, "attempts": 1, "spans": [[3, TOKENS]], "reprefill": 0}


class Method:
    """A method of a Ray actor."""

    def __init__(self, function):
        self.remote = function


class Server:
    """A vLLM server. `scores`: the teacher's. `cuts`: a coin falls while the response runs, and the engine ends it."""

    def __init__(self, scores: bool = False, cuts: bool = False):
        self.scores, self.cuts, self.asked, self.ended = scores, cuts, [], []
        self.generate, self.esgrpo_finish_group = Method(self._generate), Method(self._finish)

    async def _generate(self, request_id, prompt_ids, sampling_params, **_):
        self.asked.append(dict(sampling_params))
        if self.scores:
            return TokenOutput([7], stop_reason="completed", extra_fields={
                "prompt_ids": list(prompt_ids), "prompt_logprobs": [-1.0] * len(prompt_ids), "global_steps": None})
        seat = rollout_driver.current.get()
        if self.cuts and seat is not None:
            seat.response.decision = DOOMED
        outcome, rule = ("prune", DOOMED["rule"]) if self.cuts else ("finish", "")
        payload = {"outcome": outcome, "rule": rule, "spans": [[3, TOKENS]], "boundaries": 0, "logprob_sum": -1.0,
                   "replica": "0", "arrived": 0.0}
        return TokenOutput([7] * TOKENS, stop_reason="completed",
                           extra_fields={"global_steps": 3, "kv_transfer_params": {"esgrpo": payload}})

    async def _finish(self, group, members, rule):
        self.ended.append(list(members))


class Wrapper:
    """What a trainer of the user's may hand to its workers: hands a call on to verl's client."""

    def __init__(self, client):
        self.inner = client

    async def generate(self, *args, **kwargs):
        return await self.inner.generate(*args, **kwargs)


class Loop:
    """An agent loop of one turn."""

    def __init__(self, server_manager, **_):
        self.client = server_manager

    async def run(self, sampling_params, **_):
        output = await self.client.generate("r", prompt_ids=list(PROMPT), sampling_params=dict(sampling_params))
        return SimpleNamespace(response_ids=output.token_ids, reward_score=1.0, extra_fields={}, multi_modal_data=None,
                               mm_processor_kwargs=None)


def client_of(server: Server, kind: str = "LLMServerClient"):
    """verl's own client of one server."""
    from verl.workers.rollout import llm_server

    async def fields():
        return []

    async def acquire(request_id):
        return "teacher" if server.scores else "student", server

    balancer = SimpleNamespace(require_acquire_fields=Method(fields), require_release_fields=Method(fields),
                               acquire_server=Method(acquire), release_server=Method(lambda server_id: None))
    rollout = SimpleNamespace(name="vllm", full_determinism=False, prompt_length=BUDGET, response_length=BUDGET)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    if kind == "Wrapper":
        return Wrapper(Wrapper(client_of(server)))
    return getattr(llm_server, kind)(config, balancer)


def worker_of(llm_client, teacher_client):
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager

    manager = object.__new__(AsyncTeacherLLMServerManager)
    manager.teacher_client, manager.teacher_key = {"t": teacher_client}, "t"
    manager.teacher_model_configs = {"t": SimpleNamespace(inference=SimpleNamespace(temperature=1.0))}
    manager.distillation_loss_config = SimpleNamespace(topk=0, loss_settings=SimpleNamespace(use_topk=False))

    async def postprocess(output, validate, **kwargs):
        await made._compute_teacher_logprobs(output, PROMPT, output.response_ids, validate, kwargs)
        return output

    made = object.__new__(AgentLoopWorker)
    vars(made).update(
        config=SimpleNamespace(data=None), rollout_config=SimpleNamespace(n=1, response_length=BUDGET), tools=[],
        llm_client=llm_client, tokenizer=None, processor=None, hf_model_type=None, dataset_cls=None,
        distillation_enabled=True, teacher_key="t", teacher_server_manager=manager, _agent_loop_postprocess=postprocess)
    return made


@pytest.fixture
def play(monkeypatch):
    """play(hooked, kind, cut) -> (output, student's server, teacher's) of one member."""
    from verl.experimental.agent_loop import agent_loop
    from verl.workers.rollout.llm_server import LLMServerClient

    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True}))
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)
    monkeypatch.setitem(agent_loop._agent_loop_registry, "probe", {"_target_": f"{__name__}.Loop"})
    run = agent_loop.AgentLoopWorker._run_agent_loop

    def played(hooked: bool, kind: str = "LLMServerClient", cut: bool = False):
        student, teacher = Server(cuts=cut), Server(scores=True)
        with monkeypatch.context() as patch:
            if hooked:
                for name, hook in (("generate", client_attempts), ("_acquire_server", attempt_places)):
                    patch.setattr(LLMServerClient, name, wrapped(hook, getattr(LLMServerClient, name)))
            worker = worker_of(client_of(student, kind), client_of(teacher))

            async def scene():
                trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
                output = await (wrapped(followed_members, run) if hooked else run)(
                    worker, {"temperature": 1.0}, trajectory, agent_name="probe", uid="g")
                for _ in range(20):  # advice goes its own way
                    await asyncio.sleep(0)
                return output

            return asyncio.run(scene()), student, teacher

    return played


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient", "Wrapper"])
def test_a_teacher_is_no_attempt_of_the_member(play, kind, cut):
    output, student, teacher = play(True, kind, cut)
    row = output.extra_fields["esgrpo"]
    assert {name: row[name] for name in FOLLOWED} == FOLLOWED
    assert (row["outcome"], row["rule"]) == (("prune", "verdict") if cut else ("finish", ""))
    assert student.asked[0]["extra_args"]["segment"]["group"] == "g"
    assert teacher.asked == [TEACHERS] and not teacher.ended  # it knows nothing of our groups
    assert output.extra_fields["teacher_ids"].tolist() == [*PROMPT, *[7] * TOKENS]


def test_plain_verl_asks_the_teacher_the_same(play):
    """Negative control of the hooks."""
    output, student, teacher = play(False)
    assert "esgrpo" not in output.extra_fields and "extra_args" not in student.asked[0]
    assert teacher.asked == [TEACHERS] and output.extra_fields["teacher_ids"].tolist() == [*PROMPT, *[7] * TOKENS]


def test_whoever_follows_every_client_counts_the_teacher(play, monkeypatch):
    """Negative control of the scene: a token, an attempt and a prefill more, and the teacher's engine is told to end
    the member's request."""
    monkeypatch.setattr(rollout_driver.Seat, "follows", lambda seat, client: True)
    output, _, teacher = play(True, cut=True)
    row = output.extra_fields["esgrpo"]
    assert (row["tokens"], row["attempts"], row["spans"]) == (TOKENS + 1, 2, [[3, TOKENS], [-1, 1]])
    assert row["reprefill"] and teacher.ended == [[0]] and "segment" in teacher.asked[0]["extra_args"]
