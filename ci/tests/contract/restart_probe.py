"""Child of test_restart_of_0_7_0: a chain of starts of v0.7.0's own rollouter and trainer that die and are resumed.

python restart_probe.py DIRECTORY prints one JSON object. Feed, samples, batches, sync and checkpoints are the recipe's;
Ray's calls, the engine, the weights and the logger are stand-ins.
"""

import asyncio
import json
import os
import pickle
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import release_0_7_0

release_0_7_0.importable()

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from recipe.fully_async_policy import fully_async_rollouter, fully_async_trainer  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from verl import DataProto  # noqa: E402

PROMPTS, BATCH, SIZE, LENGTH = 24, 4, 2, 3
STARTS = (1, 2, 1, PROMPTS)  # checkpoints after which a start dies; the last one ends
METHODS = {  # slug -> method of the class that Ray ships by value
    "rollouter": {"partial-prompts-in-flight": "_create_continuous_iterator",
                  "partial-prompts-in-flight-are-saved": "save_checkpoint",
                  "partial-prompts-in-flight-are-reissued": "load_checkpoint",
                  "partial-generated-prompts": "_process_single_sample_streaming"},
    "trainer": {"partial-taken-prompts": "_get_samples_from_queue",
                "partial-trained-prompts": "_trigger_parameter_sync_after_step",
                "partial-trained-prompts-before-checkpoint": "_save_checkpoint"},
}
Rollouter = fully_async_rollouter.FullyAsyncRollouter.__ray_metadata__.modified_class
Trainer = fully_async_trainer.FullyAsyncTrainer.__ray_metadata__.modified_class


class Call:
    """`handle.method.remote(...)`: done at once, in a thread of its own where it is a coroutine."""

    def __init__(self, function):
        self.function = function

    def remote(self, *args, **kwargs):
        answer = self.function(*args, **kwargs)
        if not asyncio.iscoroutine(answer):
            return answer
        found = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(answer)))
        thread.start()
        thread.join()
        return found[0]


class Handle:
    def __init__(self, instance):
        self._instance = instance
        self.__dict__["__ray_call__"] = Call(lambda function, *args: function(instance, *args))

    def __getattr__(self, name):
        return Call(getattr(self._instance, name))


class Synchronizer:
    """The recipe's, without weights."""

    def __init__(self, rollouter):
        self.rollouter = rollouter

    def sync_weights(self, version, validate=False, global_steps=0):
        pass

    def wait_last_valid(self):
        pass

    def rollouter_save_checkpoint(self, folder):
        return self.rollouter.save_checkpoint.remote(folder)


class Queue:
    """The recipe's client, in this process."""

    def __init__(self):
        self.samples = []

    async def put_sample(self, sample, param_version):
        self.samples.append(sample)
        return True

    def get_sample_sync(self):
        return self.samples.pop(0), len(self.samples)

    def get_statistics_sync(self):
        return {"queue_size": len(self.samples)}


class Generation:
    """The agent loop manager; `interrupts` says that the next group meets a weight sync."""

    interrupts = False

    async def generate_single_sample_async(self, batch, outputs):
        if self.interrupts:
            return ["an output"] * len(batch), True
        ones = torch.ones(len(batch), LENGTH, dtype=torch.int64)
        times = np.zeros(len(batch))
        return DataProto.from_dict(
            tensors={"responses": ones, "response_mask": ones, "attention_mask": ones},
            non_tensors={"number": batch.non_tensor_batch["number"], "processing_times": times,
                         "tool_calls_times": times, "param_version_start": times, "param_version_end": times}), False


def collate(rows):
    messages = np.empty(len(rows), dtype=object)
    messages[:] = [[{"role": "user", "content": f"prompt {row}"}] for row in rows]
    return {"raw_prompt": messages, "number": np.array(rows, dtype=object), "dummy": torch.zeros(len(rows), 1)}


def config_of(directory: Path):
    return OmegaConf.create({
        "trainer": {"resume_mode": "auto", "default_hdfs_dir": None, "default_local_dir": str(directory),
                    "balance_batch": False, "save_freq": 1, "esi_redundant_time": 0,
                    "del_local_ckpt_after_load": False, "total_epochs": 1},
        "rollout": {"total_epochs": 1}, "async_training": {"trigger_parameter_sync_step": 1},
        "actor_rollout_ref": {"rollout": {"n": SIZE, "multi_turn": {"enable": False}}}})


def rollouter_of(config):
    made = object.__new__(Rollouter)
    made.config, made.required_samples, made.total_rollout_steps, made.global_steps = config, BATCH, PROMPTS, 1
    shuffled = torch.utils.data.RandomSampler(range(PROMPTS), generator=torch.Generator().manual_seed(5))
    made.train_dataloader = StatefulDataLoader(list(range(PROMPTS)), batch_size=1, collate_fn=collate, sampler=shuffled)
    made.dataloader_lock, made.pending_queue = asyncio.Lock(), asyncio.Queue(maxsize=3)
    made.cancel_queue, made.active_tasks, made.message_queue_client = asyncio.Queue(), set(), Queue()
    made.async_rollout_manager, made.current_param_version = Generation(), 0
    for name in ("total_generated_samples", "staleness_samples", "dropped_stale_samples", "processed_sample_count",
                 "max_required_samples", "staleness_threshold", "max_queue_size", "max_concurrent_samples"):
        setattr(made, name, 0)
    return made


def trainer_of(config, rollouter):
    made = object.__new__(Trainer)
    made.config, made.tokenizer, made.required_samples = config, None, BATCH
    made.message_queue_client = rollouter.message_queue_client
    made.param_synchronizer = Handle(Synchronizer(Handle(rollouter)))
    silent = SimpleNamespace(**{name: lambda *args, **kwargs: {} for name in (
        "log", "update", "reset", "get_aggregated_metrics", "save_checkpoint", "load_checkpoint")})
    made.actor_rollout_wg = made.logger = made.progress_bar = made.metrics_aggregator = silent
    made.current_param_version = made.last_ckpt_version = made.max_steps_duration = 0
    made.global_steps = made.local_trigger_step = made.trigger_parameter_sync_step = 1
    made.use_critic = False
    return made


def step(trainer) -> list[int]:
    """One round of the trainer's fit(); the prompts that it trained."""
    _, batch = trainer._get_samples_from_queue()
    trainer._trigger_parameter_sync_after_step(global_steps=trainer.global_steps)
    trainer._check_save_checkpoint({})
    trainer.global_steps += 1
    return [int(number) for number in batch.non_tensor_batch["number"][::SIZE]]


async def start(directory: Path, dies_after: int) -> tuple[list[int], list[str]]:
    """Trains until so many checkpoints are written, then dies with a group interrupted and one in the queue."""
    config = config_of(directory)
    rollouter = rollouter_of(config)
    trainer = trainer_of(config, rollouter)
    trainer.load_checkpoint()
    rollouter.load_checkpoint()
    feed = asyncio.ensure_future(rollouter._feed_samples())
    trained, names, waiting, saved, fed = [], [], [], 0, True
    while saved < dies_after and (fed or len(waiting) >= BATCH):
        while fed and len(waiting) < BATCH + 2:
            sample = await rollouter.pending_queue.get()
            fed = sample != "DONE"
            waiting += [sample] if fed else []
            names += [sample.sample_id] if fed else []
        if fed:
            interrupted = waiting.pop(0)
            rollouter.async_rollout_manager.interrupts = True
            await rollouter._process_single_sample_streaming(interrupted)
            rollouter.async_rollout_manager.interrupts = False
            waiting.append(await rollouter.cancel_queue.get())
        in_queue = BATCH - len(rollouter.message_queue_client.samples) + bool(fed)
        batch, waiting = waiting[:in_queue], waiting[in_queue:]
        for sample in batch:
            await rollouter._process_single_sample_streaming(sample)
        trained += step(trainer)
        saved += 1
    while rollouter.message_queue_client.samples and saved < dies_after:  # the end of the data
        for sample in waiting:
            await rollouter._process_single_sample_streaming(sample)
        waiting = []
        trained += step(trainer)
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    return trained, names


def ship(file: Path) -> None:
    """What is to arrive in a process without hooks of its own: Ray pickles these classes by value."""
    file.write_bytes(ray.cloudpickle.dumps({"rollouter": Rollouter, "trainer": Trainer}))


def carried(path: str) -> dict[str, list[str]]:
    from esgrpo import engine

    classes = pickle.loads(Path(path).read_bytes())
    return {who: [slug for slug, name in slugs.items() if engine.carries(getattr(classes[who], name), slug)]
            for who, slugs in METHODS.items()}


def main():
    directory = Path(sys.argv[-1])
    if sys.argv[1] == "--load":
        print(json.dumps(carried(directory)))
        return
    ray.get = lambda reference, timeout=None: reference
    ray.wait = lambda references, num_returns, timeout: (references, [])
    hooked = "esgrpo.engine" in sys.modules and sys.modules["esgrpo.engine"].enabled()
    counts, names = Counter(), []
    for checkpoints in STARTS:
        if hooked:
            from esgrpo import records

            os.environ.update(records.begun(str(directory), goes_on=True))
        trained, ids = asyncio.run(asyncio.wait_for(start(directory / "checkpoints", checkpoints), 60))
        counts.update(trained)
        names.append(ids)
    ship(directory / "classes")
    answer = {"trained": {str(number): times for number, times in counts.items()}, "names": names}
    if hooked:
        from esgrpo import records
        from esgrpo.tools import books

        records.flush()
        (found,), _ = books.of_directory(str(directory))
        answer["books"] = books.as_dict(found)
    print(json.dumps(answer))


main()
