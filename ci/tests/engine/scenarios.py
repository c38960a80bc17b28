"""What happens in the engine processes of the tests: `python scenarios.py SCENARIO MODEL OUT`.

Each scenario starts one AsyncLLM with its spawned EngineCore, plays requests and writes what a client saw as JSON.
Nothing is asserted here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

MAX_NUM_SEQS = 4
RUNNING = ("0", "1", "2", "3")  # of more than MAX_NUM_SEQS requests, those that run first
SHARED_PROMPT = 150  # tokens, more than a block of the KV cache
FORCED = 65  # the token of the request that loops


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j) % 200 + 10 for j in range(12 + i)]


class Client:
    """Requests on one engine, and what came back."""

    def __init__(self, engine):
        self.engine = engine
        self.count = 0
        self.seen: dict[str, int] = {}  # label -> tokens so far
        self.labels: dict[str, str] = {}  # request id -> label

    async def call(self, name: str, *args):
        return await self.engine.engine_core.call_utility_async(name, *args)

    async def request(self, label: str, tokens: list[int], group="g", member=0, done_before=0, **sampling) -> dict:
        from vllm import SamplingParams

        self.count += 1
        self.labels[f"r{self.count}"] = label
        parameters = SamplingParams(
            ignore_eos=True, logprobs=0, **sampling,
            extra_args={"segment": {"group": group, "member": member, "done_before": done_before}})
        self.seen[label] = 0
        final = None
        async for output in self.engine.generate({"prompt_token_ids": tokens}, parameters, f"r{self.count}"):
            self.seen[label] = len(output.outputs[0].token_ids)
            final = output
        answer = final.outputs[0]
        logprobs = [float(next(iter(position.values())).logprob) for position in answer.logprobs or []]
        return {"tokens": list(answer.token_ids), "logprobs": logprobs, "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason, "payload": (final.kv_transfer_params or {}).get("esgrpo"),
                "cached": final.num_cached_tokens}

    async def together(self, requests: dict[str, dict], then=None) -> dict:
        """Queue all requests before the first step, so that every run has the same batches; `then` runs beside."""
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        self.seen.clear()
        tasks = {}
        for label, arguments in requests.items():
            tasks[label] = asyncio.create_task(self.request(label, **arguments))
            while (await self.call("probe"))["requests"] < len(tasks):
                await asyncio.sleep(0.01)
        await self.engine.resume_generation()
        extra = await then() if then is not None else None
        answers = {label: await asyncio.wait_for(task, 60) for label, task in tasks.items()}
        return {"answers": answers, "extra": extra, "after": await self.call("probe")}

    async def logged(self, requests: dict[str, dict]) -> dict:
        """`together` with the batches that were scheduled, one list of [label, tokens] a step."""
        await self.engine.reset_prefix_cache()
        await self.call("step_log")
        run = await self.together(requests)
        run["steps"] = [[[self.labels[key], count] for key, count in step] for step in await self.call("step_log")]
        return run

    async def until(self, label: str, tokens: int) -> None:
        while self.seen.get(label, 0) < tokens:
            await asyncio.sleep(0.002)


def greedy(count: int, max_tokens: int, forced: int | None = None, group: str = "g") -> dict[str, dict]:
    """Greedy requests. The penalty counts prompt and response alike: no loops, and re-submitting changes nothing."""
    requests = {}
    for i in range(count):
        requests[str(i)] = {"tokens": prompt(i), "group": group, "member": i, "temperature": 0.0,
                            "repetition_penalty": 1.3, "max_tokens": max_tokens}
    if forced is not None:
        requests[str(forced)]["logit_bias"] = {FORCED: 100.0}
    return requests


def sampled(count: int, max_tokens: int, spread: int = 0) -> dict[str, dict]:
    """Seeded sampling; request i makes max_tokens + i * spread tokens."""
    return {str(i): {"tokens": prompt(i), "member": i, "temperature": 1.0, "seed": 100 + i,
                     "max_tokens": max_tokens + i * spread} for i in range(count)}


def mixed_lengths() -> dict[str, dict]:
    """Three times as many requests as fit, of all lengths: batches change at every ending."""
    return sampled(3 * MAX_NUM_SEQS, 20, spread=7)


async def bare(client: Client) -> dict:
    try:
        report = await client.call("esgrpo_report")
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    return {"report": report, "greedy": await client.together(greedy(4, 96)),
            "looping": await client.together(greedy(4, 96, forced=1)),
            "sampled": [await client.together(sampled(8, 40)) for _ in range(2)],
            "mixed": [await client.logged(mixed_lengths()) for _ in range(2)]}


async def undecided(client: Client) -> dict:
    return {"mixed": await client.logged(mixed_lengths())}


async def elastic(client: Client) -> dict:
    return {**await undecided(client), **await over_a_sync(client)}


async def over_a_sync(client: Client) -> dict:
    """New weights come while requests run, wait, or share a prompt, in the order of verl's update_weights."""
    from esgrpo import config

    rebuild, shared = config.current().sync.kv == "rebuild", [(5 * i) % 190 + 20 for i in range(SHARED_PROMPT)]
    await client.call("esgrpo_set_version", 1)
    before = await client.together(greedy(6, 96))

    async def act():
        await client.until("0", 20)
        await client.engine.pause_generation(mode="keep", clear_cache=rebuild)
        seen, probe = await client.call("esgrpo_progress", "g"), await client.call("probe")
        await client.call("new_weights", 3.0)
        await client.engine.reset_prefix_cache(reset_connector=True)
        await client.engine.reset_mm_cache()
        await client.engine.reset_encoder_cache()
        window = await client.call("esgrpo_set_version", 2)
        await client.engine.resume_generation()
        return {"seen": sorted(seen.items()), "probe": probe, "window": window}

    requests = greedy(6, 96)
    requests["1"]["tokens"] = shared
    kept = await client.together(requests, act)
    cuts = {label: kept["answers"][label]["payload"]["spans"][0][1] for label in RUNNING}
    again = await client.together({
        label: {**requests[label], "tokens": requests[label]["tokens"] + kept["answers"][label]["tokens"][:cut],
                "done_before": cut, "max_tokens": 96 - cut} for label, cut in cuts.items()})
    return {"report": await client.call("esgrpo_report"), "before": before, "kept": kept, "again": again,
            "shared": await shared_prompt(client, shared), "last": await client.call("esgrpo_set_version", 3)}


async def shared_prompt(client: Client, shared: list[int]) -> dict:
    """One request of two with the same prompt runs while weights come; the other comes after them."""
    async def act():
        await client.until("first", 20)
        await client.engine.pause_generation(mode="keep", clear_cache=False)
        await client.engine.reset_prefix_cache(reset_connector=True)
        await client.engine.resume_generation()
        return await client.request("second", shared, member=1, temperature=0.0, max_tokens=20)

    sampling = {"tokens": shared, "temperature": 0.0, "max_tokens": 300}
    return await client.together({"first": {**sampling, "member": 0}}, act)


async def quiet(client: Client) -> dict:
    return {"report": await client.call("esgrpo_report"), "sampled": await client.together(sampled(8, 40)),
            "versions": await versions(client), "finish": await finish(client), "member": await member(client),
            "surplus": await surplus(client), "abort": await pause_abort(client),
            "keep": await pause_keep(client, False), "rebuild": await pause_keep(client, True),
            "shared": await shared_prompt(client, [(5 * i) % 190 + 20 for i in range(SHARED_PROMPT)]),
            "looping": await client.together(greedy(4, 96, forced=1))}


async def versions(client: Client) -> dict:
    """Two weight versions arrive while requests run."""
    async def sync():
        windows = []
        for version, tokens in ((2, 10), (3, 30)):
            await client.until("0", tokens)
            windows.append(await client.call("esgrpo_set_version", version))
        return windows

    await client.call("esgrpo_set_version", 1)
    result = await client.together(greedy(3, 96), sync)
    result["extra"].append(await client.call("esgrpo_set_version", 4))
    return result


async def finish(client: Client) -> dict:
    """A whole group is finished while two members run, two wait, and the engine is paused for an exact count."""
    order = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3), ("b", 2)]
    requests = {f"{group}{m}": {"tokens": prompt(i), "group": group, "member": m, "temperature": 0.0, "max_tokens": 400}
                for i, (group, m) in enumerate(order)}

    async def act():
        await client.until("a0", 5)
        await client.engine.pause_generation(mode="keep", clear_cache=False)
        seen, before = dict(client.seen), await client.call("probe")
        progress = [await client.call("esgrpo_progress", name) for name in ("a", "b", "nobody")]
        found = [await client.call("esgrpo_finish", name, None, "group") for name in ("a", "nobody")]
        await client.engine.resume_generation()
        return {"seen": seen, "before": before, "found": found,
                "progress": [sorted(members.items()) for members in progress]}

    return await client.together(requests, act)


async def member(client: Client) -> dict:
    """One member by its number, in full flight."""
    async def act():
        await client.until("2", 5)
        return await client.call("esgrpo_finish", "m", [2, 17], "group")

    return await client.together(greedy(4, 200, group="m"), act)


async def surplus(client: Client) -> dict:
    """verl's server hands three requests back while four run and two wait."""
    from esgrpo.hooks.verl.server.control_methods import esgrpo_hand_back

    async def act():
        await client.until("3", 5)
        found = await esgrpo_hand_back(SimpleNamespace(node_rank=0, engine=client.engine), 3)
        return {"found": found, "books": {m: await client.call("esgrpo_take_book", "g", m, 0) for m in (4, 5)}}

    return await client.together(greedy(6, 200), act)


async def pause_abort(client: Client) -> dict:
    async def act():
        await client.until("0", 5)
        await client.engine.pause_generation(mode="abort", clear_cache=True)
        probe = await client.call("probe")
        await client.engine.resume_generation()
        return probe

    return await client.together(greedy(6, 300), act)


async def pause_keep(client: Client, clear_cache: bool) -> dict:
    """Freeze and go on; the tokens while paused are looked at twice."""
    async def act():
        await client.until("0", 5)
        await client.engine.pause_generation(mode="keep", clear_cache=clear_cache)
        first, probe = dict(client.seen), await client.call("probe")
        await asyncio.sleep(0.2)
        second = dict(client.seen)
        await client.engine.resume_generation()
        return {"first": first, "second": second, "probe": probe}

    return await client.together(greedy(4, 96), act)


async def hand_back(client: Client) -> dict:
    """Every response comes back at each boundary and is submitted again with what it has."""
    first = await client.together(greedy(4, 96))
    carried = {label: list(answer["tokens"]) for label, answer in first["answers"].items()}
    attempts = {label: [answer] for label, answer in first["answers"].items()}
    while any(len(tokens) < 96 for tokens in carried.values()):
        requests = {label: {**greedy(4, 96 - len(carried[label]))[label], "tokens": prompt(int(label)) + carried[label],
                            "done_before": len(carried[label])} for label in carried if len(carried[label]) < 96}
        for label, answer in (await client.together(requests))["answers"].items():
            attempts[label].append(answer)
            carried[label] += answer["tokens"]
    unaligned = await client.request("odd", prompt(0), done_before=27, temperature=0.0, max_tokens=96)
    return {"attempts": attempts, "carried": carried, "unaligned": unaligned, "after": await client.call("probe")}


async def main(scenario: str, model: str) -> dict:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 24, distributed_executor_backend="uni",
        async_scheduling=True, logprobs_mode="processed_logprobs", seed=0))
    try:
        client = Client(engine)
        result = await PLAYS[scenario](client)
        result["class"] = (await client.call("probe"))["class"]
        return result
    finally:
        engine.shutdown()


PLAYS = {"bare": bare, "quiet": quiet, "yield": hand_back, "off": undecided, "elastic": elastic,
         "rebuild": over_a_sync}

if __name__ == "__main__":
    name, model_folder, out = sys.argv[1:]
    answer = asyncio.run(main(name, model_folder))
    with open(out, "w", encoding="utf-8") as file:
        json.dump(answer, file)
