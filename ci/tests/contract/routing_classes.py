"""Child process: history, queue and router on the classes that verl really imports. Last line: what was seen, as JSON.

`hooked`: under the overlay's hooks, and once more after they were taken away (the negative control).
"""

import asyncio
import json
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

SLUGS = ("history-saved-at-end", "prompt-forecasts", "prompt-queue", "tail-router", "rollouter-windows")
CONCURRENT, GROUP, BUDGET, PROMPTS = 2, 4, 256, 12
LONG = {5: 120, 8: 200}  # prompt -> response tokens of the few long ones; the others have SHORT
SHORT = 20
OTHERS = 24  # requests of the body class beside four of the tail


def config():
    from omegaconf import OmegaConf

    return OmegaConf.create({
        "actor_rollout_ref": {"hybrid_engine": False, "actor": {"ppo_mini_batch_size": 4}, "rollout": {
            "calculate_log_probs": True, "n": GROUP, "multi_turn": {"enable": False}, "router_config_path": None}},
        "data": {"train_batch_size": 0, "gen_batch_size": 1, "train_files": [], "val_files": [],
                 "max_response_length": BUDGET},
        "async_training": {"staleness_threshold": 100, "trigger_parameter_sync_step": 1, "require_batches": 1,
                           "concurrent_samples_per_replica": CONCURRENT},
        "trainer": {"device": "cpu", "project_name": "p", "experiment_name": "e", "total_epochs": 2},
        "rollout": {"total_rollout_steps": None}, "reward": {}})


def rows(numbers):
    """One batch of the dataloader: a single prompt, as verl's collate function gives it."""
    import numpy as np
    import torch

    prompts = np.empty(1, dtype=object)
    prompts[0] = [{"role": "user", "content": f"prompt {numbers}"}]
    return {"raw_prompt": prompts, "dummy_tensor": torch.tensor([[numbers]])}


class Loader(list):
    def state_dict(self):
        return {}


class Manager:
    """Stands for the agent loops: answers a prompt with verl's real _postprocess after as many ticks as tokens."""

    def __init__(self):
        self.started, self.forecasts = [], []

    async def generate_sequences_single(self, batch):
        from verl.experimental.agent_loop import agent_loop

        number = int(batch.batch["dummy_tensor"][0, 0])
        self.started.append(number)
        self.forecasts.append([row.get("esgrpo_forecast") for row in kwargs_of(batch)])
        tokens = LONG.get(number, SHORT)
        for _ in range(tokens):
            await asyncio.sleep(0)
        worker = SimpleNamespace(reward_loop_worker_handles=["on"])
        return agent_loop.AgentLoopWorker._postprocess(worker, [row(agent_loop, tokens, i) for i in range(len(batch))])


def kwargs_of(batch):
    """The keyword arguments that generate_sequences makes of every row (its own expression)."""
    return [{k: v[i] for k, v in batch.non_tensor_batch.items() if k != "__do_sample__"} for i in range(len(batch))]


def row(agent_loop, tokens, member):
    """One response; member 0 was cut after half by a verdict, member 1 is wrong."""
    import torch

    outcome, count = ("prune", tokens // 2) if member == 0 else ("finish", tokens)
    ones, pad = torch.ones(1, count, dtype=torch.long), torch.zeros(1, BUDGET - count, dtype=torch.long)
    mask = torch.cat([ones, pad], dim=1)
    summary = {"tokens": count, "outcome": outcome, "rule": "verdict" if member == 0 else "", "predicted": 0.1,
               "spans": [[5, count]], "group": "g", "member": member}
    return agent_loop._InternalAgentLoopOutput(
        prompt_ids=torch.ones(1, 2, dtype=torch.long), response_ids=mask, response_mask=mask,
        attention_mask=torch.cat([torch.ones(1, 2, dtype=torch.long), mask], dim=1),
        input_ids=torch.ones(1, 2 + BUDGET, dtype=torch.long),
        position_ids=torch.ones(1, 2 + BUDGET, dtype=torch.long), reward_score=float(member != 1),
        num_turns=1, metrics=agent_loop.AgentLoopMetrics(), extra_fields={"esgrpo": summary})


class Queue:
    """The message queue's client."""

    def __init__(self):
        self.samples = []

    async def put_sample(self, sample):
        self.samples.append(sample)
        return True

    async def get_statistics(self):
        return {"queue_size": 0}

    async def get_queue_size(self):
        return 0


def rollouter():
    """verl's real rollouter through its real __init__; only the data set and its files are fakes."""
    from verl.experimental.fully_async_policy import fully_async_rollouter as module

    cls = module.FullyAsyncRollouter.__ray_metadata__.modified_class
    with ExitStack() as stack:
        for name in ("create_rl_dataset", "create_rl_sampler"):
            stack.enter_context(mock.patch.object(module, name, lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(module, "need_reward_model", lambda config: False))
        stack.enter_context(mock.patch.object(cls, "_init_dump_executor", lambda self: None))
        stack.enter_context(mock.patch.object(
            cls, "_create_dataloader",
            lambda self, *args: setattr(self, "train_dataloader", Loader(rows(i) for i in range(PROMPTS)))))
        made = cls(config(), tokenizer=None)
    made.message_queue_client, made.async_rollout_manager = Queue(), Manager()
    made.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: 1, get_replicas=list)
    return made


def run_rollouter() -> dict:
    """Two epochs through verl's own feeder, processor and fit."""
    from ray import cloudpickle

    async def scene():
        made = rollouter()
        made._init_async_objects()
        before = made.pending_queue.maxsize
        await made.set_max_required_samples()
        depths, put = [], made.pending_queue._put

        def counted(item):
            put(item)
            depths.append(made.pending_queue.qsize())

        made.pending_queue._put = counted
        # fit's monitor looks up every ten seconds only; the rest of fit is its own
        with mock.patch.object(type(made), "_async_monitor_loop", no_monitor):
            await asyncio.wait_for(made.fit(), 60)
        metrics = await made.reset_staleness()
        return made, before, depths, metrics

    made, before, depths, metrics = asyncio.run(scene())
    sent = [cloudpickle.loads(sample) for sample in made.message_queue_client.samples[:-1]]
    from esgrpo.hooks.verl import owned

    history = owned.of(made, owned.Prompts).history
    file = os.path.join(os.environ["ESGRPO_RUN_DIR"], "esgrpo", "history.json")
    saved = os.path.exists(file)
    if saved:
        os.unlink(file)
    return {"started": made.async_rollout_manager.started, "forecasts": made.async_rollout_manager.forecasts,
            "depth": max(depths), "maxsize": [before, made.pending_queue.maxsize], "left": made.pending_queue.qsize(),
            "sent": [sample.sample_id for sample in sent], "ended": made.message_queue_client.samples[-1] is None,
            "columns": sorted({key for sample in sent for key in sample.full_batch.non_tensor_batch
                               if key.startswith("esgrpo")}),
            "prompts": len(history) if history else 0, "saved": saved,
            "posterior": history.posterior(key_of(8)) if history else None,
            "prior": history.posterior("never seen") if history else None,
            "metrics": {key: value for key, value in metrics.items() if key.startswith("esgrpo/")}}


async def no_monitor(self):
    pass


def key_of(number):
    from esgrpo.algo.history import prompt_key

    return prompt_key(rows(number)["raw_prompt"][0])


def run_router(hooked: bool) -> dict:
    """verl's real plugin loader and real router class, with a stand-in for ray.remote."""
    import ray
    from verl.workers.rollout import router

    made = []

    class Remote:
        def __init__(self, cls):
            self.remote = lambda *args, **kwargs: made.append(cls(*args, **kwargs)) or made[-1]

    servers = {f"replica-{i}": f"handle-{i}" for i in range(4)}
    path = None
    if hooked:
        from esgrpo import config as settings
        from esgrpo.hooks.verl.server import tail_router

        path = tail_router.config_path(os.environ["ESGRPO_RUN_DIR"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(tail_router.config_text(settings.current()))
    with mock.patch.object(ray, "remote", Remote):
        balancer = router.get_router_handle(servers, router_config_path=path)
    moment = SimpleNamespace(now=0.0)
    return drive(balancer, moment)


def drive(balancer, moment) -> dict:
    share = getattr(balancer, "_share", None)
    if share is not None:
        share.clock = lambda: moment.now
    acquire, release = balancer.require_acquire_fields(), balancer.require_release_fields()

    def go(request, length):
        fields = {"sampling_params": {"extra_args": {"segment": {"length_class": length}}}}
        server, handle = balancer.acquire_server(request_id=request, **{k: fields[k] for k in acquire})
        assert handle == server.replace("replica", "handle")
        return server

    def done(server, request):
        balancer.release_server(server_id=server, **({"request_id": request} if "request_id" in release else {}))

    first = {f"long-{i}": go(f"long-{i}", "tail") for i in range(4)}
    first |= {f"other-{i}": go(f"other-{i}", "body") for i in range(OTHERS)}
    for _ in range(10):  # time passes: the share adjusts
        moment.now += 1.0
        first["tick"] = go("tick", "short")
        done(first.pop("tick"), "tick")
    for name in [name for name, server in first.items() if name.startswith("other") and server == "replica-0"]:
        done(first.pop(name), name)  # the shorter ones end
    again = {}
    for name in [name for name in first if name.startswith("long")]:  # each yields and is submitted again
        done(first[name], name)
        again[name] = go(name, "tail")
    fresh = [go(f"fresh-{i}", "body") for i in range(6)]
    status = balancer.get_status()
    assert status["total_inflight"] == len(first) + len(fresh)
    known = {"class": type(balancer).__name__, "fields": [acquire, release], "first": first, "again": again,
             "fresh": fresh}
    share_then = balancer._share.replicas if share is not None else 0
    for request, server in {**first, **again, **{f"fresh-{i}": s for i, s in enumerate(fresh)}}.items():
        done(server, request)
    known["left"] = balancer.get_total_inflight()
    balancer.remove_servers(["replica-0", "replica-1", "replica-2"])
    known["alone"] = go("after", "tail")
    known["taken"] = balancer.esgrpo_take_metrics() if hasattr(balancer, "esgrpo_take_metrics") else None
    known["tail_replicas"] = [share_then, share.replicas if share is not None else 0]
    return known


def observe(hooked: bool) -> dict:
    return {"rollouter": run_rollouter(), "router": run_router(hooked)}


def main(hooked: bool) -> None:
    seen = {"states": {}, "plain": None}
    if hooked:
        from esgrpo import engine

        engine.boot()
    import verl.experimental.fully_async_policy.fully_async_rollouter  # noqa: F401

    seen["seen"] = observe(hooked)
    if hooked:
        states = {state["slug"]: state for state in engine.states("rollouter")}
        seen["states"] = {slug: [states[slug]["state"], states[slug]["detail"]] for slug in SLUGS}
        for slug in SLUGS:
            if states[slug]["state"] == "APPLIED" and slug != "tail-router":  # nothing names the plugin: no effect
                engine.revert(slug)
        seen["plain"] = observe(False)
    print(json.dumps(seen))


main(sys.argv[1:] == ["hooked"])
