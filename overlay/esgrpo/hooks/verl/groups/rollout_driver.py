"""Carries out what `algo/rollout.py` decides in an agent-loop worker of verl. No hook; called by those that are.

Advice (asking how far members are, ending them, telling lengths, sharing what the audit learned) runs beside the
responses, under a deadline: a server that does not answer costs the advice, never a response. It is counted under
"advice/failed" and said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import random
import sys
import time
import zlib
from dataclasses import dataclass, field

from esgrpo import config, records
from esgrpo.algo import attempts, rollout, rows
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import GroupPruner
from esgrpo.algo.looks import ASK_EVERY_S
from esgrpo.algo.terms import PAYLOAD, Outcome
from esgrpo.algo.verdict import verdicts_of
from esgrpo.algo.verdict_features import Glance
from esgrpo.errors import EsgrpoError, say
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.metrics import decision_counts
from esgrpo.hooks.verl.server.calls_with_deadline import answers
from esgrpo.hooks.verl.server.control_methods import methods

_attempts = itertools.count(1)  # of this worker, which no other one shares a member with
ABORTED = ("aborted", "abort")  # stop reasons at which verl's client submits again
ADVICE = (rollout.Ask, rollout.Finish, rollout.JoinTail, rollout.Share, rollout.Teach)

current: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("esgrpo_seat", default=None)


@dataclass(frozen=True)
class Seat:
    """The member whose agent loop runs in this context."""

    driver: Driver
    group: str
    number: int
    client: object = field(default=None, compare=False, repr=False)  # the worker's; None: whoever is called

    def follows(self, client) -> bool:
        """Is a call of `client` an attempt of the member? verl asks the teacher of a distillation in this context, too:
        a client of other servers, which have no scheduler of ours."""
        return self.client is None or _leads_to(self.client, client)

    @property
    def response(self) -> attempts.Response | None:
        return self.driver.runs.response(self.group, self.number)

    def fields(self) -> dict:
        return self.driver.runs.fields(self.group, self.number)

    def on(self, event, **facts):
        """The action that answers the caller: Submit, HandOn, Record, or None. Advice goes its own way."""
        return self.driver.on(event(self.group, self.number, **facts))

    def placed(self, replica, handle) -> None:
        self.driver.handles[replica] = handle
        self.on(rollout.Placed, replica=replica)


def _leads_to(outer, client) -> bool:
    """Whether `outer` is that client, or a wrapper that holds it or another wrapper of it."""
    waiting, seen = [outer], set()
    while waiting:
        held = waiting.pop()
        if held is client:
            return True
        if id(held) not in seen:
            seen.add(id(held))
            waiting += [each for each in getattr(held, "__dict__", {}).values() if hasattr(type(each), "generate")]
    return False


class Driver:
    """One per agent-loop worker. `size` members a group, `budget` tokens a response."""

    def __init__(self, worker_index: int, budget: int, pool=None):
        settings = config.current()
        pruner = None
        if settings.audited:
            audit = Audit(settings.prune.audit, random.Random(f"{settings.seed}-{worker_index}"))
            verdicts = (verdicts_of(settings, random.Random(f"{settings.seed}-{worker_index}-verdict"))
                        if settings.prune.verdict.enable else None)
            pruner = GroupPruner(settings, audit, budget, verdicts)
        self.runs = rollout.GroupRuns(rollout.Rules(settings, budget, config.facts()["replicas"], pruner))
        self.handles: dict[object, object] = {}  # replica -> server handle
        self.rewards: dict[tuple[str, int], tuple] = {}  # (score, acc) of members whose row is written (v1)
        self.index, self._pool, self._tasks, self._said = worker_index, pool, set(), False
        self._looks: asyncio.Task | None = None  # asks replicas for their looks while anybody runs
        if pruner is not None:
            self._carry_out([rollout.Share([])])  # what the run has learned so far
            if pruner.verdicts is not None:
                self._carry_out([rollout.Teach(None)])

    @property
    def decisions(self):
        return self.runs.rules.decisions

    def prompt(self, group: str, raw_prompt) -> str | None:
        """Key of a group's prompt, computed once a group; None when the data set gives no raw_prompt."""
        from esgrpo.algo.history import prompt_key

        run = self.runs.groups.get(group)
        known = None if run is None else run.prompt
        return prompt_key(raw_prompt) if known is None and raw_prompt is not None else known

    def on(self, event):
        actions = self.runs.on(event)
        if isinstance(event, rollout.MemberEnded) and event.group not in self.runs.groups:
            self._note()
        if isinstance(event, rollout.Placed):
            self._watch()
        return self._carry_out(actions)

    def _watch(self) -> None:
        pruner = self.runs.rules.pruner
        if pruner is not None and pruner.verdicts is not None and (self._looks is None or self._looks.done()):
            self._looks = asyncio.get_running_loop().create_task(self._ask_for_looks())

    async def _ask_for_looks(self) -> None:
        """One message a replica, for all groups that it holds members of. The others do not wait for one that is late:
        it is asked again when it has answered, or its deadline is over."""
        asked: dict[object, asyncio.Task] = {}
        while self.runs.groups:
            await asyncio.sleep(ASK_EVERY_S)
            for replica, groups in self.runs.places().items():
                if replica not in asked or asked[replica].done():
                    asked[replica] = self._start(self._look(replica, groups))

    async def _look(self, replica, groups: list[str]) -> None:
        try:
            for found in await self._call([replica], "esgrpo_take_looks", groups):
                for group, looks in found.items():
                    self.on(rollout.Looked(group, {int(number): [Glance(*glance) for glance in glances]
                                                   for number, glances in looks.items()}))
        except Exception as error:
            self._say(error, "members run on without a verdict")

    def _note(self) -> None:
        """A group is over: what was decided is recorded, if anything was."""
        pruner = self.runs.rules.pruner
        decision_counts.write("agent-loop-worker", self.decisions, {} if pruner is None else pruner.reports())

    def _carry_out(self, actions: list[rollout.Action]):
        answer = None
        for action in actions:
            if isinstance(action, ADVICE):
                self._start(self._advise(action))
            else:
                answer = action
        return answer

    def _start(self, work) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop keeps weak references only
        task.add_done_callback(self._tasks.discard)
        return task

    async def _advise(self, action) -> None:
        try:
            await {rollout.Ask: self._ask, rollout.Finish: self._finish, rollout.JoinTail: self._join_tail,
                   rollout.Share: self._share, rollout.Teach: self._teach}[type(action)](action)
        except Exception as error:
            self._say(error, f"the group goes on without it ({type(action).__name__})")

    def _say(self, error: Exception, consequence: str) -> None:
        self.decisions["advice/failed"] += 1
        if not self._said:
            self._said = True
            say(EsgrpoError("group-members", f"{type(error).__name__}: {error}",
                            "an answer", f"{consequence}; counted, not said again",
                            "see whether a replica is down or overloaded"))

    async def _call(self, replicas, method: str, *args) -> list:
        """The answers of these replicas, each within the deadline."""
        calls = [call.remote(*args) for call in methods([self.handles[replica] for replica in replicas], method)]
        return await answers(calls, method)

    async def book_of(self, seat: Seat, attempt: int) -> dict | None:
        """What the replica's book knew of an attempt that vLLM's front end ended, by an abort or at a stop string.

        Only asked where requests outlive weight syncs: elsewhere all tokens of an attempt are of the server's version.
        """
        replica = self.runs.place(seat.group, seat.number)
        if not self.runs.rules.settings.keeps or replica not in self.handles:
            return None
        try:
            found = await self._call([replica], "esgrpo_take_book", seat.group, seat.number, attempt)
            return found[0] if found else None
        except Exception as error:
            self._say(error, "the weight versions of tokens of an attempt are the server's")
            return None

    async def _each(self, method: str, asked: dict) -> tuple[list, BaseException | None]:
        """All replicas at once (`asked`: the arguments of each), each within its own deadline: one that hangs keeps
        nothing from the others. Returns the answers that came, and the first failure."""
        heard = await asyncio.gather(*(self._call([replica], method, *given) for replica, given in asked.items()),
                                     return_exceptions=True)
        failed = [found for found in heard if isinstance(found, BaseException)]
        parts = [answer for found in heard if not isinstance(found, BaseException) for answer in found]
        return parts, failed[0] if failed else None

    async def _ask(self, action: rollout.Ask) -> None:
        parts, failed = await self._each("esgrpo_progress", {replica: (action.group,) for replica in action.replicas})
        self.on(rollout.Progress(action.group, {int(number): tokens for answer in parts
                                                for number, tokens in answer.items()}))
        if failed is not None:
            raise failed

    async def _finish(self, action: rollout.Finish) -> None:
        """The coin is recorded, so everybody has to be told."""
        _, failed = await self._each("esgrpo_finish_group", {
            replica: (action.group, list(numbers), action.rule) for replica, numbers in action.members.items()})
        if failed is not None:
            raise failed

    async def _join_tail(self, action: rollout.JoinTail) -> None:
        await self._call(action.replicas, "esgrpo_set_segment_length", action.group, action.length, True)

    def _pool_of_run(self):
        if self._pool is None:
            from esgrpo.hooks.verl.groups import audit_pool

            self._pool = audit_pool.of_run(self.runs.rules.budget)
        return self._pool

    async def _share(self, action: rollout.Share) -> None:
        if self._pool_of_run() is not None:
            answer, = await answers([self._pool.exchange.remote(self.index, action.lessons)], "exchange")
            self.runs.on(rollout.Learned(*answer))

    async def _teach(self, action: rollout.Teach) -> None:
        if self._pool_of_run() is not None:
            state, = await answers([self._pool.teach.remote(self.index, action.lessons)], "teach")
            self.runs.on(rollout.Taught(state))


def of_worker(worker, budget: int) -> Driver:
    """The driver of this worker process, made on first use."""
    kept = owned.of(worker, owned.Worker)
    if kept.driver is None:
        kept.driver = Driver(worker_index(), budget)
    return kept.driver


def worker_index() -> int:
    """A number that differs from worker to worker and is the same in the next run.

    verl names its workers agent_loop_worker_<index>_<uuid>; a worker without that name is told apart by its name.
    """
    ray = sys.modules.get("ray")
    name = ray.get_runtime_context().get_actor_name() if ray is not None and ray.is_initialized() else ""
    numbers = [part for part in (name or "").split("_") if part.isdecimal()]
    return int(numbers[0]) if numbers else zlib.crc32((name or "").encode())


def join(driver: Driver, group: str, size: int, client=None, **facts) -> Seat:
    """A member of `group` begins, or comes back: what this client is asked for is its own. Raises EsgrpoError where two
    prompts share a group id."""
    with collisions_in_one_line(group):
        return Seat(driver, group, driver.on(rollout.Submitted(group, size, time.time(), **facts)).member, client)


@contextlib.contextmanager
def collisions_in_one_line(group: str):

    try:
        yield
    except rollout.GroupCollision:
        raise EsgrpoError("group-members", f"group id {group} is in use by another prompt", "one uid per prompt",
                          "rewards of two prompts would be mixed, the run stops",
                          "make non_tensor_batch['uid'] unique") from None


class Attempts:
    """A call of verl's generate(prompt_ids, sampling_params) for one response, made once per attempt."""

    def __init__(self, call, unlimited):
        """`unlimited(rollout config, tokens of the prompt)`: what the server takes for a call without a limit."""
        self._call, self._prompt = call, list(call.arguments["prompt_ids"])
        self._parameters = dict(call.arguments["sampling_params"])  # shared by all responses of the worker
        budget = self._parameters.get("max_tokens", self._parameters.pop("max_new_tokens", None))
        if budget is None:  # of the first attempt: a later one's prompt has the tokens that the earlier ones made
            budget = unlimited(call.owner.config.actor_rollout_ref.rollout, len(self._prompt))
        self._budget = budget
        self._attempt = 0

    async def next(self, done: list[int], fields: dict):
        """What the original answers to an attempt after the tokens `done`, of which the scheduler is told `fields`."""
        self._attempt = next(_attempts)
        extra = {**(self._parameters.get("extra_args") or {}), "segment": {**fields, "attempt": self._attempt}}
        limited = {**self._parameters, "max_tokens": self._budget - len(done), "extra_args": extra}
        return await self._call(prompt_ids=self._prompt + done, sampling_params=limited)

    async def ended(self, seat: Seat, output, done: list[int]):
        """Submit or HandOn after that attempt."""
        return await attempt_ended(seat, output, len(self._prompt) + len(done),
                                   self._budget - len(done) - len(output.token_ids), self._attempt)


async def attempt_ended(seat: Seat, output, prompt_tokens: int, left: int, attempt: int = 0):
    """Submit or HandOn after one attempt; sets what the attempt's TokenOutput says to what really happened. `attempt`:
    the number that the scheduler was told."""
    fields = output.extra_fields
    aborted = output.stop_reason in ABORTED
    answer = (fields.pop("kv_transfer_params", None) or {}).get(PAYLOAD)
    if answer is None and output.token_ids:
        answer = await seat.driver.book_of(seat, attempt)
        if answer is not None and output.log_probs:
            answer = {**answer, "logprob_sum": sum(output.log_probs)}  # of what was given, not of what was made
        if answer is not None:  # to the engine a stop string is an abort, and it may have ended what is aborted
            answer = {**answer, "outcome": Outcome.ABORT if aborted else Outcome.FINISH}
    action = seat.on(rollout.AttemptEnded, now=time.time(), tokens=len(output.token_ids), left=left,
                     aborted=aborted, answer=answer,
                     version=fields.get("global_steps"),
                     prefilled=prompt_tokens - (fields.get("num_cached_tokens") or 0))
    if action.versions is not None:
        # verl's range of an attempt is that of the server when its answer is read: a request that lived through a
        # weight sync would look entirely fresh
        first, last = action.versions
        fields["global_steps"] = last
        fields.update({name: version for name, version in (("min_global_steps", first), ("max_global_steps", last))
                       if name in fields})
    output.stop_reason = "segment" if isinstance(action, rollout.Submit) else action.stop_reason or output.stop_reason
    return action


def reward_of(output) -> tuple:
    """(score, acc or None) of an AgentLoopOutput. verl's `dapo` reward manager leaves a tensor as the score of an
    overlong response; a record and a pruner want a float."""
    score = output.reward_score
    return None if score is None else float(score), (output.extra_fields.get("reward_extra_info") or {}).get("acc")


def row_of(action: rollout.Record, driver: Driver) -> rows.Response:
    """The row with what identifies this process and run, and what it has decided so far: the trainer counts that."""
    return dataclasses.replace(action.row, **records.identity(), records_dropped=records.dropped(),
                               decisions=dict(+driver.decisions))


def attach(output, row: rows.Response) -> None:
    """The row travels with the output to the trainer; verl's version range starts at its first token."""
    output.extra_fields["esgrpo"] = row.row()
    if row.spans and row.spans[0][0] >= 0:
        output.extra_fields["min_global_steps"] = row.spans[0][0]
