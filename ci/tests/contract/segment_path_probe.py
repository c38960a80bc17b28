"""Child of test_segment_path_of_0_7_0: groups of responses through v0.7.0's own worker, client and partial server.

python segment_path_probe.py CASE prints one JSON object. The classes are the recipe's, with what Ray would ship: the
methods of the modified actor classes. Only Ray's remote calls, the engine and the reward are stand-ins.
"""

import asyncio
import importlib.metadata
import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

_version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.11.0" if name == "vllm" else _version(name)
# that version does not say "cpu", and a vLLM that finds no platform loads the kernels of a processor with AVX-512 BF16
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import release_0_7_0  # noqa: E402

release_0_7_0.importable()
# need the vLLM of the time, and are not on the way of a response
sys.meta_path.insert(0, release_0_7_0.StandIns("verl.utils.vllm.vllm_fp8_utils", "vllm.entrypoints",
                                               "verl.workers.rollout.vllm_rollout.vllm_rollout"))

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from recipe.fully_async_policy.agent_loop import agent_loop  # noqa: E402
from recipe.fully_async_policy.detach_utils import prepare_single_generation_data  # noqa: E402
from recipe.fully_async_policy.vllm_rollout import vllm_async_server  # noqa: E402
from scripted_engine import FIRST_ID, ScriptedEngine  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402

from esgrpo import config as settings  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402

MEMBERS, RESPONSE_LENGTH, PROMPT_LENGTH = 4, 24, 64
TOKENIZER = Path(__file__).resolve().parents[3] / "bench" / "testbed" / "model"
MESSAGES = [{"role": "user", "content": "1"}]


def shipped(actor_class):
    return actor_class.__ray_metadata__.modified_class


CONFIG = OmegaConf.create({
    "actor_rollout_ref": {"rollout": {
        "n": MEMBERS, "response_length": RESPONSE_LENGTH, "prompt_length": PROMPT_LENGTH, "temperature": 1.0,
        "top_p": 1.0, "calculate_log_probs": True, "multi_turn": {"enable": False}}},
    "data": {}, "reward_model": {"enable": False, "enable_resource_pool": False}})


class Remote:
    """An actor handle: `handle.method.remote(...)`, arguments and results pickled as Ray does."""

    def __init__(self, instance):
        self.instance = instance

    def __getattr__(self, name):
        method = getattr(self.instance, name)

        async def remote(*args, **kwargs):
            args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
            return pickle.loads(pickle.dumps(await method(*args, **kwargs)))

        return SimpleNamespace(remote=remote)


def server_of(engine):
    server = object.__new__(shipped(vllm_async_server.vLLMHttpServerForPartial))
    server.config = SimpleNamespace(max_model_len=PROMPT_LENGTH + RESPONSE_LENGTH, response_length=RESPONSE_LENGTH,
                                    get=lambda name, default=None: default)
    server.model_config = SimpleNamespace(processor=None)
    server.engine, server.node_rank, server.paused, server.lock = engine, 0, False, asyncio.Lock()
    server.cancel_event, server.req_output = {}, {}
    return server


def worker_of(server, tokenizer):
    worker = object.__new__(shipped(agent_loop.FullyAsyncAgentLoopWorker))
    worker.config, worker.tokenizer, worker.processor = CONFIG, tokenizer, None
    worker.server_manager = agent_loop.FullyAsyncLLMServerManager(CONFIG, [Remote(server)])
    worker.dataset_cls, worker.reward_router_address, worker.use_reward_loop = RLHFDataset, None, None
    worker.cancellation_event = asyncio.Event()
    return worker


def script(number: int, length: int, loop=False) -> list[int]:
    body = [7] * (length - 1) if loop else list(range(length - 1))
    return [FIRST_ID + number, *body]


class Scene:
    def __init__(self, scripts, segment):
        os.environ["ESGRPO_SEGMENT"] = json.dumps(segment)
        self.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        prompt = self.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True,
                                                    return_dict=False)
        self.engine = ScriptedEngine(scripts, len(prompt), settings.parse(segment))
        self.server = server_of(self.engine)
        apply = self.tokenizer.apply_chat_template  # transformers 5 returns a mapping where 4 returned the ids
        self.tokenizer.apply_chat_template = lambda *args, **kw: apply(*args, **{**kw, "return_dict": False})
        raw_prompt = np.empty(1, dtype=object)
        raw_prompt[0] = MESSAGES
        # what the dataset of v0.7.0 and its collate function give
        self.batch = prepare_single_generation_data(
            {"raw_prompt": raw_prompt, "index": np.array([0], dtype=object),
             "dummy_tensor": torch.zeros(1, 1, dtype=torch.uint8)}, CONFIG)

    def worker(self):
        return worker_of(self.server, self.tokenizer)

    async def call(self, worker, version, outputs=None):
        self.batch.non_tensor_batch["param_version"] = [version] * len(self.batch)
        outputs = pickle.loads(pickle.dumps(outputs or [None] * MEMBERS))
        return pickle.loads(pickle.dumps(await worker.generate_sequences_no_post(self.batch, outputs)))

    def answer(self, batch) -> dict:
        rows = []
        for i in range(len(batch)):
            valid = batch.batch["attention_mask"][i, PROMPT_LENGTH:].bool()
            rows.append({"tokens": batch.batch["responses"][i][valid].tolist(),
                         "log_probs": batch.batch["rollout_log_probs"][i][valid].tolist(),
                         "mask": int(batch.batch["response_mask"][i].sum()),
                         "esgrpo": batch.non_tensor_batch["esgrpo"][i] if "esgrpo" in batch.non_tensor_batch else None,
                         "versions": [int(batch.non_tensor_batch[f"param_version_{end}"][i]) for end in
                                      ("start", "end")]})
        return {"rows": rows, "submitted": self.engine.submitted, "columns": sorted(batch.non_tensor_batch),
                "left": [len(self.engine.running), len(self.engine.book.tracked)]}


def loops(segment=None, lengths=(6, 40, 40, 10)):
    """Scripts: short, longer than the budget, a repetition loop, medium."""
    scripts = [script(n, length, loop=n == 2) for n, length in enumerate(lengths)]
    return Scene(scripts, {"enable": True, "segment_length": 4, **(segment or {})})


REPETITION = {"prune": {"treatment": "masked", "repetition": {"enable": True, "max_pattern_size": 2, "min_span": 6,
                                                              "check_interval": 4}}}


async def to_the_end(segment):
    scene = loops(segment)
    batch, interrupted = await scene.call(scene.worker(), version=3)
    assert not interrupted
    return scene.answer(batch)


async def interrupted_and_resumed(segment, steps=8):
    scene = loops(segment)
    first = scene.worker()
    task = asyncio.create_task(scene.call(first, version=3))
    while scene.engine.steps < steps:
        await asyncio.sleep(0)
    await scene.server.cancel()
    outputs, interrupted = await task
    while_paused, still = await scene.call(scene.worker(), version=4, outputs=outputs)
    await scene.server.resume()
    assert interrupted and still
    batch, interrupted = await scene.call(scene.worker(), version=5, outputs=while_paused)
    assert not interrupted
    driver = owned.of(first, owned.Worker).driver
    return {**scene.answer(batch), "first": [[len(o.response_ids) if isinstance(o.response_ids, list) else None,
                                              o.extra_fields.get("is_cancel", False)] for o in outputs],
            "groups_left": [0 if driver is None else len(driver.runs.groups)]}


async def advantages():
    scene = loops(REPETITION)
    batch, _ = await scene.call(scene.worker(), version=0)
    rewards = torch.zeros_like(batch.batch["response_mask"], dtype=torch.float32)
    rewards[:, 0] = torch.tensor([2.0, 1.0, 7.0, 0.0])
    arguments = {"token_level_rewards": rewards, "response_mask": batch.batch["response_mask"],
                 "index": np.array(["uid"] * MEMBERS, dtype=object)}
    estimate = {}
    for name in ("grpo", "grpo_segment"):
        try:
            estimate[name] = core_algos.get_adv_estimator_fn(name)(**arguments, config=OmegaConf.create({}))[0][:, 0]
        except Exception as error:
            estimate[name] = torch.tensor([])
            estimate[name + "_error"] = torch.tensor([len(str(error))])
    return {**scene.answer(batch), "advantages": {name: value.tolist() for name, value in estimate.items()}}


async def by_value():
    """What is to arrive in another process, in PROBE_SHIPPED: Ray pickles the modified class by value, closures too."""
    Path(os.environ["PROBE_SHIPPED"]).write_bytes(ray.cloudpickle.dumps(shipped(agent_loop.FullyAsyncAgentLoopWorker)))
    server = vllm_async_server.vLLMHttpServerForPartial.__ray_metadata__.method_meta.methods
    return {"methods": sorted(name for name in server if name.startswith("esgrpo_"))}  # what a handle is made from


def carried(path: str) -> list[str]:
    """Slugs of the hooks that came along, in a process that has none of its own."""
    from esgrpo import engine

    arrived = pickle.loads(Path(path).read_bytes())
    slugs = {"partial-group": "generate_sequences_no_post", "partial-members": "_partial_run_agent_loop"}
    return [slug for slug, name in slugs.items() if engine.carries(getattr(arrived, name), slug)]


CASES = {
    "by-value": by_value,
    "soft": lambda: to_the_end(REPETITION),
    "yield": lambda: to_the_end({"boundary": "yield", **REPETITION}),
    "resumed": lambda: interrupted_and_resumed({"boundary": "yield"}),
    "advantages": advantages,
}


async def in_order(case):
    """verl tokenizes in threads; with one of them, prompts reach the engine in the order of the rows on any machine."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    return await case()


def main():
    if sys.argv[1] == "--load":
        print(json.dumps(carried(sys.argv[2])))
        return
    answers = {}
    for name in sys.argv[1:]:
        try:
            answers[name] = asyncio.run(in_order(CASES[name]))
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
            if os.environ.get("PROBE_TRACEBACK"):
                raise
    engine = sys.modules.get("esgrpo.engine")
    if engine and engine.enabled():
        answers["states"] = {row["slug"]: [row["state"], row["detail"]] for row in engine.states("agent-loop-worker")
                             if row["upstream"] == "verl"}
    print(json.dumps(answers))


main()
