"""The same groups through every driver of algo/rollout.py, in lockstep: a step gives one token to whoever decodes.

What the drivers differ in by construction is taken away: orders to an engine take effect between two steps, prefill,
messages and weight syncs take no time. So the same things are true when a decision is taken, and nothing but the
drivers themselves can make it another one. Each `play_*` returns what went into and came out of `GroupRuns.on`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from bench.common.workload import Group
from bench.engine import driver as engine_driver
from bench.policies import Limits
from bench.policies.es_grpo import EsGrpo
from bench.sim.device import Device
from bench.sim.simulation import Course, Simulation
from ci.tests.engine.fake_fleet import FakeFleet, FakeReplica
from ci.tests.property.rollout_fakes import ResumingClient, TokenOutput
from esgrpo import config
from esgrpo.algo import rollout, rows
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import GroupPruner
from esgrpo.algo.segments import CONTINUE, SegmentBook
from esgrpo.algo.terms import PAYLOAD, Outcome
from esgrpo.call import Call, wrapped
from esgrpo.hooks.verl.groups import followed_members as group_members
from esgrpo.hooks.verl.groups import rollout_driver
from esgrpo.hooks.verl.v0_7_0 import client_attempts, grouped_calls
from esgrpo.hooks.verl.v0_7_0 import followed_members as partial_members
from esgrpo.hooks.verl.v1.rows import response_rows

PROMPT = [900]
AT_ONCE, ENDLESS = float("inf"), 1 << 40
DELIVERY_TICKS = 20  # of the event loop, until a request is in its engine: longer than a question and its verdict
LONGEST_RUN = 10_000  # steps


@dataclass(frozen=True)
class Script:
    """`groups` of bench.common.workload, `past` are visits before; an update takes `per_update` whole groups."""

    groups: list[Group]
    members: int
    cap: int
    overrides: dict  # of the elastic profile
    past: list[Group] = field(default_factory=list)
    modules: str = "ABC"  # of bench.policies.es_grpo
    per_update: int = 1
    keeps: bool = True  # requests outlive an update
    replicas: int = 2

    @property
    def updates(self) -> int:
        return len(self.groups) // self.per_update

    def limits(self) -> Limits:
        places = self.members * len(self.groups)
        return Limits(self.replicas, places, places, self.cap, self.members, self.per_update)

    def policy(self) -> EsGrpo:
        """ES-GRPO as it is benchmarked, with the coins of the first agent-loop worker."""
        script = self

        class Scripted(EsGrpo):
            modules, overrides, keeps = script.modules, script.overrides, script.keeps
            over = float(script.updates)

            def new_pruner(self):
                if not self.settings.audited:
                    return None
                audit = Audit(self.settings.prune.audit, random.Random(f"{self.settings.seed}-0"))
                return GroupPruner(self.settings, audit, self.limits.cap)

        policy = Scripted(self.limits(), random.Random(1))
        policy.remember(self.past)
        return policy


@contextlib.contextmanager
def recorded(script: Script) -> Iterator[list]:
    """Settings of the script in the environment; yields the list of (event, actions) that fills meanwhile."""
    log, original = [], rollout.GroupRuns.on

    def on(self, event):
        actions = original(self, event)
        log.append((event, actions))
        return actions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.GroupRuns, "on", on)
        patch.setattr(engine_driver, "ABORT_WAIT_S", 0.0)
        patch.setenv(config.ENV_SEGMENT, config.to_json(script.policy().settings))
        patch.setenv(config.ENV_FACTS, json.dumps({"replicas": script.replicas}))
        patch.delenv("ESGRPO_RUN_DIR", raising=False)
        yield log


# The benchmarks


def play_simulator(script: Script) -> list:
    device = Device("lockstep", ((1, 1.0),), AT_ONCE, ENDLESS, 0.0)
    with recorded(script) as log:
        Simulation(script.policy(), script.limits(), device, Course(script.updates), _source(script)).run()
    return log


class LockstepReplica(FakeReplica):
    def do_yield(self, sample):
        if sample in self.requests:
            self.end(sample, "yield")

    def do_prune(self, sample, _rule):
        if sample in self.requests:
            self.end(sample, "prune")

    def do_sync(self, mode, _seconds):
        for sample in list(self.requests) if mode == "abort" else ():
            self.end(sample, "abort")
        self.tell("resumed")

    def obey(self) -> None:
        """Carry out what was ordered; `step` then only decodes."""
        commands, self.commands = self.commands, []
        for name, *arguments in commands:
            getattr(self, f"do_{name}")(*arguments)


class LockstepFleet(FakeFleet):
    def __init__(self, replicas: int, sequences: int):
        self.replicas = [LockstepReplica(sequences, lag=0) for _ in range(replicas)]

    def poll(self, _seconds):
        for replica in self.replicas:
            replica.obey()
        if not any(replica.events for replica in self.replicas):
            for replica in self.replicas:
                replica.step()
        return [(number, replica.message()) for number, replica in enumerate(self.replicas)]


def play_engine(script: Script) -> list:
    limits = script.limits()
    course = engine_driver.Course(script.updates, 0.0, 0.0, 0.5, 1000, 1)
    with recorded(script) as log:
        fleet = LockstepFleet(script.replicas, limits.sequences)
        engine_driver.Driver(fleet, script.policy(), limits, course, _source(script), AT_ONCE).run()
    return log


def _source(script: Script):
    rest = list(script.groups)

    def take(count: int) -> list[Group]:
        taken, rest[:count] = rest[:count], []
        return taken

    return take


# The hooks


@dataclass
class Request:
    fields: dict
    done: int
    target: int  # tokens of the whole response
    future: asyncio.Future
    tokens: list[int] = field(default_factory=list)


class ScriptedServer:
    """A server as the agent-loop workers see it, with the segment book of its scheduler."""

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.book, self.requests, self.aborted = SegmentBook(config.current()), {}, {}
        self.book.version = 0
        for method in ("finish_group", "progress", "set_segment_length", "take_book"):
            setattr(self, f"esgrpo_{method}", SimpleNamespace(remote=getattr(self, f"_{method}")))

    async def generate(self, prompt_ids: list[int], parameters: dict) -> TokenOutput:
        for _ in range(DELIVERY_TICKS):
            await asyncio.sleep(0)
        fields, key = parameters["extra_args"]["segment"], self.world.new_key()
        request = Request(fields, len(prompt_ids) - len(PROMPT), self.world.target(fields),
                          asyncio.get_running_loop().create_future())
        assert fields["done_before"] == request.done == self.world.script.cap - parameters["max_tokens"]
        self.requests[key] = request
        self.book.add(key, **fields, earlier=prompt_ids)
        await self._end_pending()
        return await request.future

    def step(self) -> None:
        for key, request in list(self.requests.items()):
            request.tokens.append(request.done + len(request.tokens))
            if request.done + len(request.tokens) == request.target:
                self._end(key, Outcome.FINISH)
        for key in self.book.advance():
            if key in self.requests:
                tokens = self.requests[key].tokens
                decision = self.book.look(key, tokens, (0.0, len(tokens)))
                if decision.outcome != CONTINUE:
                    self._end(key, decision.outcome, decision.rule)

    def _close(self, key: str, outcome: str, rule: str = "") -> tuple[Request, dict]:
        request = self.requests.pop(key)
        item = self.book.close(key, len(request.tokens))
        return request, {"outcome": str(outcome), "rule": rule, "spans": item.spans, "boundaries": item.boundaries,
                         "logprob_sum": 0.0, "replica": self.name, "arrived": 0.0}

    def _end(self, key: str, outcome: str, rule: str = "") -> None:
        request, payload = self._close(key, outcome, rule)
        self._answer(request, "completed", kv_transfer_params={PAYLOAD: payload})

    def _answer(self, request: Request, stop_reason: str, **extra) -> None:
        request.future.set_result(TokenOutput(request.tokens, [0.0] * len(request.tokens), stop_reason=stop_reason,
                                              extra_fields={"global_steps": self.world.version, **extra}))

    async def _end_pending(self) -> None:
        for key, rule in self.book.take_pending(lambda key: len(self.requests[key].tokens)).items():
            self._end(key, Outcome.PRUNE, rule)
            await quiet(DELIVERY_TICKS)  # one after the other, as a policy is told

    def sync(self) -> None:
        for key in list(self.requests) if not self.world.script.keeps else ():
            request, payload = self._close(key, Outcome.ABORT)
            self.aborted[request.fields["group"], request.fields["member"], request.fields["attempt"]] = payload
            self._answer(request, "aborted")
        self.book.set_version(self.world.version, {key: len(item.tokens) for key, item in self.requests.items()})

    async def _finish_group(self, group, members, rule):
        found = self.book.ask_finish(group, members, rule)
        await self._end_pending()
        return found

    async def _progress(self, group):
        return {request.fields["member"]: request.done + len(request.tokens) for request in self.requests.values()
                if request.fields["group"] == group}

    async def _set_segment_length(self, group, length, tail):
        return self.book.set_segment_length(group, length, tail,
                                            {key: len(item.tokens) for key, item in self.requests.items()})

    async def _take_book(self, group, member, attempt):
        return self.aborted.pop((group, member, attempt), None)


async def quiet(ticks: int) -> None:
    for _ in range(ticks):
        await asyncio.sleep(0)


class World:
    """Servers, one agent-loop worker, and the rollouter that starts its groups."""

    def __init__(self, script: Script):
        self.script, self.version, self.keys = script, 0, 0
        self.servers = [ScriptedServer(self, str(number)) for number in range(script.replicas)]
        self.index: dict[str, int] = {}  # the hooks' name of a group -> its place in the script
        self.whole = 0
        rollout_ = SimpleNamespace(n=script.members, response_length=script.cap)
        self.clients = [ResumingClient(server) for server in self.servers]
        client = SimpleNamespace(**{f"of_{number}": each for number, each in enumerate(self.clients)})  # wraps them
        self.worker = SimpleNamespace(rollout_config=rollout_, llm_client=client, config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout_)))
        history = script.policy().history
        self.forecasts = [history.forecast(str(group.prompt)) for group in script.groups]

    def new_key(self) -> str:
        self.keys += 1
        return f"request-{self.keys}"

    def target(self, fields: dict) -> int:
        return self.script.groups[self.index[fields["group"]]].samples[fields["member"]].tokens

    def client(self, number: int) -> ResumingClient:
        return self.clients[number % len(self.clients)]

    def reward(self, seat, tokens: int) -> float:
        sample = self.script.groups[self.index[seat.group]].samples[seat.number]
        return float(sample.correct and tokens == sample.tokens)

    async def run(self, group_task) -> None:
        groups = [asyncio.ensure_future(self._group(group_task, index)) for index in range(len(self.script.groups))]
        await self.settle()
        for _ in range(LONGEST_RUN):
            while self.whole - self.version * self.script.per_update >= self.script.per_update:
                self.version += 1
                for server in self.servers:
                    server.sync()
                await self.settle()
            if all(group.done() for group in groups):
                break
            for server in self.servers:
                server.step()
            await self.settle()
        await asyncio.gather(*groups)
        assert self.version == self.script.updates and not any(server.requests for server in self.servers)

    async def _group(self, group_task, index: int) -> None:
        await group_task(self, index)
        self.whole += 1

    async def settle(self) -> None:
        """Until everybody waits for an engine: nothing is left that the loop could run at once."""
        ready = asyncio.get_running_loop()._ready
        await asyncio.sleep(0)
        while ready:
            await asyncio.sleep(0)


def play_fully_async(script: Script) -> list:
    return _play_hooks(script, _group_of_fully_async)


def play_v1(script: Script) -> list:
    return _play_hooks(script, _group_of_v1)


def play_0_7_0(script: Script) -> list:
    return _play_hooks(script, _group_of_0_7_0)


def _play_hooks(script: Script, group_task) -> list:
    with recorded(script) as log:
        world = World(script)
        asyncio.run(world.run(group_task))
    names = world.index
    for event, actions in log:
        for each in (event, *actions):
            if getattr(each, "group", None) in names:
                object.__setattr__(each, "group", str(names[each.group]))
    return log


async def _generate(world: World):
    """verl 0.9's agent loop: generate, then score."""
    seat = rollout_driver.current.get()
    output = await world.client(seat.number).generate("r", prompt_ids=list(PROMPT),
                                                      sampling_params={"max_tokens": world.script.cap})
    return SimpleNamespace(extra_fields=dict(output.extra_fields), token_ids=output.token_ids,
                           reward_score=world.reward(seat, len(output.token_ids)))


async def _members(world: World, index: int, original) -> None:
    name = f"uid-{index}"
    world.index[name] = index
    calls = [Call(original, (world.worker, world), {}) for _ in range(world.script.members)]
    await asyncio.gather(*(group_members.run_member(call, name, world.forecasts[index]) for call in calls))


async def _group_of_fully_async(world: World, index: int) -> None:
    async def run_agent_loop(worker, world):
        return await _generate(world)

    await _members(world, index, run_agent_loop)


async def _group_of_v1(world: World, index: int) -> None:
    async def postprocess(worker, output):
        assert output.extra_fields["esgrpo"]["score"] is None  # written to the TransferQueue before its reward

    hooked = wrapped(response_rows, postprocess)

    async def run_agent_loop(worker, world):
        await hooked(worker, await _generate(world))

    await _members(world, index, run_agent_loop)


class Batch(list):
    meta_info: dict = {}


async def _group_of_0_7_0(world: World, index: int) -> None:
    """The rollouter hands an interrupted group in again, until all of its responses are whole."""

    async def attempt(client, request_id, prompt_ids, sampling_params):
        output = await client.server.generate(prompt_ids, sampling_params)
        return output.token_ids, output.log_probs, output.stop_reason == "aborted", output.extra_fields

    hooked_attempt = wrapped(client_attempts, attempt)

    async def run_agent_loop(worker, number, **kwargs):
        seat = rollout_driver.current.get()
        if seat is None:
            return kwargs["output"]  # whole already
        world.index.setdefault(seat.group, index)
        before = [] if kwargs["output"] is None else kwargs["output"].token_ids
        parameters = {"max_tokens": world.script.cap - len(before)}
        tokens, _, interrupted, _ = await hooked_attempt(world.client(number), "r", PROMPT + before, parameters)
        tokens = before + tokens
        return SimpleNamespace(token_ids=tokens, extra_fields={"is_cancel": interrupted},
                               reward_score=world.reward(seat, len(tokens)))

    hooked_loop = wrapped(partial_members, run_agent_loop)

    async def generate_sequences(worker, batch, partial_output_list):
        return await asyncio.gather(*(hooked_loop(worker, number, output=output, param_version=world.version)
                                      for number, output in enumerate(partial_output_list)))

    hooked = wrapped(grouped_calls, generate_sequences)
    outputs = [None] * world.script.members
    while any(output is None or output.extra_fields["is_cancel"] for output in outputs):
        outputs = await hooked(world.worker, Batch(outputs), outputs)


# What is compared


@dataclass
class Played:
    """What one driver let the machine decide about one group."""

    advice: list[tuple] = field(default_factory=list)  # ended and told, in order
    members: dict[int, list[tuple]] = field(default_factory=dict)  # member -> what became of it, in order
    finished: list[int] = field(default_factory=list)  # members in the order in which they ended by themselves


def normalised(log: list) -> dict[str, Played]:
    """By group, without names of replicas and times.

    Left out is what the drivers are free in: when a client that was aborted comes back (only the hooks have such), who
    of several pruned members leaves first, and how often a group is asked meanwhile.
    """
    groups: dict[str, Played] = {}
    for event, actions in log:
        if getattr(event, "group", None) is None:
            continue
        group = groups.setdefault(event.group, Played())
        for action in actions:
            if isinstance(action, rollout.Finish):
                group.advice.append(("finish", action.rule, sorted(sum(map(list, action.members.values()), []))))
            elif isinstance(action, rollout.JoinTail):
                group.advice.append(("tail", action.length))
            elif isinstance(event, rollout.AttemptEnded) and isinstance(action, (rollout.Submit, rollout.HandOn)):
                _attempt(group.members.setdefault(event.member, []), event, action)
            elif isinstance(action, rollout.Record) and isinstance(event, rollout.MemberEnded):
                group.members.setdefault(event.member, []).append(_ending(action.row))
                group.finished += [event.member] if action.row.outcome == Outcome.FINISH else []
    return groups


def _attempt(story: list[tuple], event: rollout.AttemptEnded, action) -> None:
    if isinstance(action, rollout.Submit):
        fields = action.fields
        story.append(("submit", fields["done_before"], fields["length_class"], fields["move"]))
    elif not (event.aborted and action.stop_reason is None):
        story.append(("hand on", action.stop_reason))


def _ending(record: rows.Response) -> tuple:
    score = record.score if record.outcome == Outcome.FINISH else None  # of a pruned one each driver says its own
    return ("record", record.outcome, record.rule, record.tokens, record.candidate, record.exempted,
            record.keep_probability, record.pivot, record.candidate_rule, record.decided_by, record.tokens_at_decision,
            score, record.treatment, record.coin, record.predicted, record.predicted_reward)
