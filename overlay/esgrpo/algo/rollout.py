"""A group's life, from the first attempt of its first member to the record of its last: one pure machine.

Events come in, actions go out; the driver carries actions out and decides nothing. Drivers: the hooks of verl 0.9
(`hooks/verl/groups`, fully async and v1 alike), those of verl 0.7.0 (`hooks/verl/v0_7_0`), the simulator and the engine
benchmark (`bench/policies/es_grpo.py`). What an engine decides by itself, a boundary or a loop, it decides
with `algo/segments.py` and tells in the answer of an attempt.

    Submitted        a member begins, or comes back from an interruption     -> Submit
    Reopened         a group comes back with members that ended elsewhere
    Placed           an attempt of a member goes to a replica                -> Finish, if a verdict fell in between
    AttemptEnded     the replica answered                                    -> Submit (again) or HandOn
    Sealed           its row is written: nothing may be decided about it     -> Record
    MemberEnded      the member has its reward, failed or was interrupted    -> Record, Ask, Share
    Progress         answer to Ask                                           -> Finish, JoinTail, Share
    Looked           an engine looked at members that run                    -> Finish
    Learned          what the audits of other workers learned
    Taught           what the learned verdicts of all workers know; the first response of a newer weight version
                     -> Teach

Events about groups or members that are unknown, or that have ended, are late or duplicates: counted in `decisions`
under "late" and otherwise without effect. A replica that leaves the pool (verl's hybrid replicas, when they train)
gives its requests back as aborted: each member says so by AttemptEnded. One that dies has no event: the request of a
dead server raises in verl's client, no release submits it elsewhere, and the run ends. Token counts are response
tokens; times are seconds of the driver's clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from esgrpo import config
from esgrpo.algo import verdict_gate
from esgrpo.algo.attempts import Response
from esgrpo.algo.group_pruning import Decided, Finished, GroupPruner
from esgrpo.algo.pruning import is_correct
from esgrpo.algo.rollout_events import (
    Action,
    Ask,
    AttemptEnded,
    Finish,
    HandOn,
    JoinTail,
    Learned,
    Looked,
    MemberEnded,
    Placed,
    Progress,
    Record,
    Reopened,
    Sealed,
    Share,
    Submit,
    Submitted,
    Taught,
    Teach,
)
from esgrpo.algo.rows import Response as Row
from esgrpo.algo.terms import LengthClass, Outcome, Rule
from esgrpo.algo.verdict_features import Glance


class GroupCollision(ValueError):
    """Two different prompts share a group id while both are running, or two members a number."""


@dataclass
class Rules:
    """What all groups of one worker share: settings, facts of the run, the audit, and the counters."""

    settings: config.Segment
    budget: int  # tokens of the longest response
    replicas: int = 1
    pruner: GroupPruner | None = None  # None: no group rule is on
    decisions: Counter = field(default_factory=Counter)  # "module/what" -> times (algo/decisions.py)
    version: int | None = None  # newest weights that an attempt ended under

    @property
    def moves(self) -> bool:
        """A response that joins the tail class may be handed back once, to go on at a tail replica."""
        routing = self.settings.routing
        return routing.enable and routing.tail_share > 0 and self.replicas > 1


class GroupRun:
    """One group. Invariants: a member joins once and ends once; it is decided at most once and never once its row is
    written; the tokens of its attempts sum to those of its record, and so do its spans."""

    def __init__(self, name: str, size: int, rules: Rules, ended: dict[int, Outcome] | None = None):
        self.name, self.size, self.rules = name, size, rules
        self.states: dict[int, Outcome | None] = dict(ended or {})  # member -> how it ended; None: it runs
        self.running: dict[int, Response] = {}
        self.where: dict[int, object] = {}  # member -> the replica that holds its attempt
        self.tail = False  # its rest has joined the tail class
        self.prompt: str | None = None

    @property
    def over(self) -> bool:
        return not self.running and len(self.states) == self.size

    def on(self, event) -> list[Action]:
        if isinstance(event, Submitted):
            return [self._join(event)]
        response = self.running.get(getattr(event, "member", None))
        if isinstance(event, Progress):
            return self._decide(event.tokens)
        if isinstance(event, Looked):
            return self._looked(event.looks)
        if response is None:
            self.rules.decisions["late"] += 1
            return []
        handler = {Placed: self._placed, AttemptEnded: self._attempt_ended, Sealed: self._sealed,
                   MemberEnded: self._member_ended}[type(event)]
        return handler(response, event)

    # attempts

    def _join(self, event: Submitted) -> Submit:
        number = event.member if event.member is not None else len(self.states)
        if len(self.states) >= self.size or number in self.states:
            raise GroupCollision(self.name)
        self.states[number] = None
        if event.state is None:
            response = Response(self.name, number, started=event.now, forecast=event.forecast,
                                prompt=event.prompt or self.prompt, version=event.version)
            self.prompt = response.prompt
        else:
            response = Response(**{**event.state, "outcome": Outcome(event.state["outcome"]), "version": event.version})
        self.running[number] = response
        if self.rules.pruner is not None:
            self.rules.pruner.watch(self.name, self.size, response.forecast)
        return Submit(self.name, number, self.fields(response))

    def fields(self, response: Response) -> dict:
        """What the scheduler and the router need to know about its next attempt.

        `move`: once it turns out to be of the tail class it may be handed back. An attempt that is of that class from
        the start was routed as such.
        """
        length_class = response.length_class or (response.forecast or {}).get("length_class", LengthClass.BODY)
        loops = {**({"exempt": True} if response.exempt or response.decision else {}),
                 **({"marks": response.marks} if response.marks else {})}
        return {"group": self.name, "member": response.number, "done_before": response.tokens, **loops,
                "length_class": str(length_class), "move": self.rules.moves and length_class != LengthClass.TAIL}

    def _placed(self, response: Response, event: Placed) -> list[Action]:
        self.where[event.member] = event.replica
        if not response.doomed:
            return []
        # the verdict fell between two attempts: the engine hears of it before the attempt, and ends it on arrival
        return [Finish(self.name, response.decision["rule"], {event.replica: (event.member,)})]

    def _attempt_ended(self, response: Response, event: AttemptEnded) -> list[Action]:
        self.where.pop(event.member, None)
        versions = response.attempt_ended(event)
        loop = response.rule == Rule.REPETITION
        if response.outcome == Outcome.PRUNE and loop and not response.doomed:  # by the engine, without an audit
            self.rules.decisions["loops/pruned"] += not response.cut
            response.cut = response.rule
        if response.outcome == Outcome.YIELD:
            if loop and event.left > 0:
                self._judge_loop(response)
            if response.doomed:  # since it left the engine: nobody there can hear of it
                response.prune(response.decision["rule"])
            elif event.left > 0:
                surplus = response.rule == Rule.SURPLUS
                self.rules.decisions["keep/moved" if surplus else "segments/resubmitted"] += not loop
                return [Submit(self.name, response.number, self.fields(response), versions)]
            else:
                response.outcome, response.rule = Outcome.FINISH, ""  # handed back with its last token
        stop_reason = "pruned" if response.outcome == Outcome.PRUNE else None
        return [HandOn(self.name, response.number, stop_reason, versions)]

    def _judge_loop(self, response: Response) -> None:
        """An engine has handed a proven loop back for the coin: it is doomed, or goes on and is looked at no more."""
        if self.rules.pruner is None or response.exempt or response.doomed:
            return
        decided = self.rules.pruner.loop(self.name, response.number, response.tokens, response.surprisal)
        if decided is not None:
            self._decided(response, decided)
        else:
            self.rules.decisions["loops/passed_by"] += 1
        response.exempt = not response.doomed

    def _decided(self, response: Response, decided: Decided) -> None:
        verdict = decided.verdict
        response.decision = {"rule": verdict.rule, "prune": verdict.prune, "keep_probability": decided.keep_probability,
                             "reason": verdict.reason, "tokens": decided.tokens, "pivot": decided.pivot,
                             "coin": verdict.pi, "predicted": decided.predicted, "reward": decided.reward}
        module = {Rule.REPETITION: "loops", Rule.VERDICT: "verdicts"}.get(verdict.rule, "pruning")
        self.rules.decisions[f"{module}/{'pruned' if verdict.prune else 'exempted'}"] += 1

    # endings

    def _report(self, response: Response) -> dict | None:
        pruner = self.rules.pruner
        if pruner is None or response.decision is None:
            return None
        return pruner.report(response.decision["rule"])

    def _sealed(self, response: Response, event: Sealed) -> list[Action]:
        return [Record(self.name, response.number, self._row(response, event.now, None))]

    def _row(self, response: Response, now: float, score: float | None,
             heard: verdict_gate.Outcome | None = None) -> Row:
        return response.record(now, score, self._report(response), self.rules.settings.prune.treatment, heard)

    def _member_ended(self, response: Response, event: MemberEnded) -> list[Action]:
        del self.running[event.member]
        self.where.pop(event.member, None)
        if event.carried:
            self.states[event.member] = Outcome.CARRY
            return []
        how = Outcome.FAIL if event.failed else Outcome.PRUNE if response.pruned else Outcome.FINISH
        self.states[event.member] = how
        heard = None
        if self.rules.pruner is not None:
            ending = None
            if event.score is not None:
                correct = is_correct(event.score, event.acc, self.rules.settings.success_threshold)
                ending = Finished(response.tokens, correct, float(event.score))
                self.rules.decisions["verdicts/false"] += (correct and not response.pruned
                                                           and (response.decision or {}).get("rule") == Rule.VERDICT)
            heard = self.rules.pruner.ended(self.name, event.member, ending, by_rule=response.pruned)
        actions: list[Action] = []
        if not event.failed:
            actions.append(Record(self.name, event.member, self._row(response, event.now, event.score, heard)))
            self.rules.decisions[f"treated/{self.rules.settings.prune.treatment}"] += response.pruned
        if self._wants_progress() and self.where:
            actions.append(Ask(self.name, self._replicas(self.running)))
        return actions

    def _replicas(self, members) -> tuple:
        return tuple(dict.fromkeys(self.where[number] for number in sorted(members) if number in self.where))

    # verdicts

    def _becomes_tail(self) -> bool:
        """So much of it has ended that the rest belongs to the tail replicas."""
        if not self.rules.moves or self.tail or not self.running:
            return False
        ended = sum(state is not None for state in self.states.values())
        return ended / self.size >= self.rules.settings.routing.tail_fraction

    def _wants_progress(self) -> bool:
        pruner = self.rules.pruner
        return self._becomes_tail() or (pruner is not None and bool(self.running) and pruner.wants_progress(self.name))

    def _decide(self, tokens: dict[int, int]) -> list[Action]:
        """Verdicts are taken on what is true now: others may have ended since the replicas were asked."""
        open_ = {number: count for number, count in tokens.items()
                 if number in self.running and not self.running[number].sealed}
        actions = self._prune(open_) if self.rules.pruner is not None else []
        if self._becomes_tail() and any(not response.doomed for response in self.running.values()):
            actions += self._join_tail()
        return actions

    def _prune(self, open_: dict[int, int]) -> list[Action]:
        committed = {number: response.tokens for number, response in self.running.items()}
        return self._carry_out(self.rules.pruner.checkpoint(self.name, open_, committed))

    def _looked(self, looks: dict[int, list[Glance]]) -> list[Action]:
        """Of members that are still where they were looked at, and of which no row is written."""
        here = {number: look for number, look in looks.items()
                if number in self.where and not self.running[number].sealed and not self.running[number].doomed}
        self.rules.decisions["verdicts/looks"] += sum(map(len, here.values()))
        self.rules.decisions["verdicts/late"] += len(looks) - len(here)  # it is the rule, not an oddity
        decided, let_go = self.rules.pruner.looked(self.name, here)
        self.rules.decisions["verdicts/let_go"] += let_go
        return self._carry_out(decided)

    def _carry_out(self, decided_members: dict[int, Decided]) -> list[Action]:
        doomed: dict[str, dict[object, tuple[int, ...]]] = {}
        for number, decided in decided_members.items():
            verdict = decided.verdict
            self._decided(self.running[number], decided)
            if verdict.prune and number in self.where:  # else it is between two attempts: `_placed` finishes it
                at = doomed.setdefault(verdict.rule, {})
                at[self.where[number]] = (*at.get(self.where[number], ()), number)
        return [Finish(self.name, rule, members) for rule, members in doomed.items()]

    def _join_tail(self) -> list[Action]:
        self.tail = True
        for response in self.running.values():
            response.length_class = LengthClass.TAIL
        replicas = self._replicas(self.running)
        return [JoinTail(self.name, self.rules.settings.segment_length, replicas)] if replicas else []


class GroupRuns:
    """All groups of one agent-loop worker, or of one simulated rollouter."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.groups: dict[str, GroupRun] = {}

    def on(self, event) -> list[Action]:
        """Raises GroupCollision when two prompts share a group id, or two members a number."""
        if isinstance(event, Learned):
            if event.state is not None:
                self.rules.pruner.restore(event.state)
            self.rules.pruner.absorb(event.lessons)
            return []
        if isinstance(event, Taught):
            verdicts = self.rules.pruner.verdicts
            verdicts.adopt(event.state)
            self.rules.decisions["verdicts/gate_open" if verdicts.open else "verdicts/gate_shut"] += 1
            return []
        if isinstance(event, Reopened):
            if event.group in self.groups:
                raise GroupCollision(event.group)
            if len(event.ended) < event.size:
                self.groups[event.group] = GroupRun(event.group, event.size, self.rules, event.ended)
            return []
        run = self.groups.get(event.group)
        if run is None:
            if not isinstance(event, Submitted):
                self.rules.decisions["verdicts/late" if isinstance(event, Looked) else "late"] += 1
                return []
            run = self.groups[event.group] = GroupRun(event.group, event.size, self.rules)
        actions = run.on(event)
        pruner = self.rules.pruner
        if run.over:
            del self.groups[event.group]
            if pruner is not None:
                pruner.close(event.group)
        if isinstance(event, AttemptEnded) and self._is_newer(event):
            actions = [*actions, Teach(pruner.verdicts.take().to_plain())]
        lessons = pruner.take_lessons() if pruner is not None else []
        return [*actions, Share(lessons)] if lessons else actions

    def _is_newer(self, event: AttemptEnded) -> bool:
        """The first attempt that tells of a weight sync: the verdicts of all workers are brought together."""
        pruner, spans = self.rules.pruner, (event.answer or {}).get("spans")
        version = spans[-1][0] if spans else event.version
        if pruner is None or pruner.verdicts is None or version is None or version < 0:
            return False
        before, self.rules.version = self.rules.version, max(version, self.rules.version or 0)
        return before is not None and version > before

    def places(self) -> dict[object, list[str]]:
        """Replica -> groups of which it holds a member."""
        found: dict[object, dict[str, None]] = {}
        for name, run in self.groups.items():
            for replica in run.where.values():
                found.setdefault(replica, {})[name] = None
        return {replica: list(names) for replica, names in found.items()}

    def response(self, group: str, member: int) -> Response | None:
        """The running member, or None."""
        run = self.groups.get(group)
        return None if run is None else run.running.get(member)

    def place(self, group: str, member: int):
        """The replica that holds the member's attempt, or None."""
        run = self.groups.get(group)
        return None if run is None else run.where.get(member)

    def fields(self, group: str, member: int) -> dict:
        """What the next attempt of a running member says, when an agent loop generates once more (several turns)."""
        run = self.groups[group]
        return run.fields(run.running[member])
