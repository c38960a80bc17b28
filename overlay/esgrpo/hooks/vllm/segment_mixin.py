"""SegmentMixin: what the scheduler hook puts in front of vLLM's scheduler classes.

Translates only; every decision is made by algo.segments. Nothing here runs per request and step: upstream's own loop
is left alone, and after it only the responses whose boundary may be due are looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections import Counter, OrderedDict, deque

from esgrpo.algo.accounting import Occupancy
from esgrpo.algo.routing import cheapest_to_move
from esgrpo.algo.segments import CONTINUE, PRUNE, YIELD, SegmentBook
from esgrpo.algo.terms import PAYLOAD, Outcome
from esgrpo.hooks.vllm.headroom import Headroom

BOOKS_KEPT = 4096  # more than run at once; who asks, asks at once
STOP_REASON = {PRUNE: "pruned", YIELD: "segment"}
# what a client may say about an attempt -> argument of SegmentBook.add
FIELDS = {name: name for name in ("group", "member", "done_before", "length_class", "move", "exempt", "marks",
                                  "attempt")}


@functools.cache
def mixed_with(base: type) -> type:
    """`base` with SegmentMixin in front; the same class for the same base."""
    return base if issubclass(base, SegmentMixin) else type(f"Segment{base.__name__}", (SegmentMixin, base), {})


def _drops_output(request) -> bool:
    """True when vLLM will drop what is in flight of this request, most often after a cache reset."""
    if hasattr(request, "num_stale_output_tokens"):  # >= 0.28; the flag outlives the tokens
        return request.drop_stale_output and request.num_stale_output_tokens > 0
    if hasattr(request, "async_tokens_to_discard"):  # >= 0.23
        return request.async_tokens_to_discard > 0
    return getattr(request, "discard_latest_async_tokens", False)


class SegmentMixin:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        from esgrpo import config

        self._segment_start(config.current())

    def _segment_start(self, settings) -> None:
        """Begin with an empty book; nothing may be tracked. The benchmarks change arms with it."""
        from esgrpo import config
        from esgrpo.hooks.vllm.logprob_sums import LogprobSums

        tokens_per_step = 1 + (getattr(self, "num_spec_tokens", 0) or 0)
        self.segment_most_decoded = tokens_per_step
        self.segment_book = SegmentBook(settings, tokens_per_step, config.facts()["response_length"])
        self.segment_logprobs = LogprobSums()
        # verl's server names its replica in the environment that this process was spawned with (0.8 and later)
        self.segment_replica = os.environ.get("VERL_REPLICA_RANK") or self.vllm_config.instance_id
        self.segment_occupancy = Occupancy(settings.capacity or self.max_num_running_reqs, time.time)
        self.segment_outcomes: Counter = Counter()
        self.segment_before: dict[str, int] = {}  # tokens before the last step, of requests that it gave several
        # what the book knew of attempts that the front end answers by itself, without a payload: it aborts them, also
        # at a stop string, of which the engine may hear when it has ended them
        self.segment_books: OrderedDict[tuple[str, int, int], dict] = OrderedDict()
        self.segment_all_at_once = False  # a pause aborts whatever there is
        self.segment_flight: deque[dict[str, int]] = deque()  # tokens per request of steps without their output yet
        self.segment_headroom = vars(self).get("segment_headroom") or Headroom(self)
        self.segment_headroom.keep(settings.kv_headroom if settings.enable else 0.0)

    def add_request(self, request, *args, **kwargs):
        super().add_request(request, *args, **kwargs)
        parameters = request.sampling_params
        fields = parameters is not None and (parameters.extra_args or {}).get("segment")
        if fields:
            earlier = request.prompt_token_ids if fields.get("marks") else None
            self.segment_book.add(request.request_id, earlier=earlier or (), stays=bool(parameters.stop), **{
                known: fields[name] for name, known in FIELDS.items() if name in fields})
            self.segment_occupancy.came((fields.get("group"), fields.get("member")))

    def schedule(self, *args, **kwargs):
        most = self.max_num_running_reqs
        if self.waiting and self.running and self.segment_headroom.blocks:
            self.max_num_running_reqs = self.segment_headroom.most_running(self)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs = most
        self.segment_flight.append(output.num_scheduled_tokens)
        self.segment_occupancy.observe(len(output.num_scheduled_tokens), len(self.waiting))
        return output

    def set_pause_state(self, pause_state):
        super().set_pause_state(pause_state)
        self.segment_occupancy.pause(bool(pause_state))

    def reset_prefix_cache(self, *args, **kwargs):
        """Upstream drops what is in flight of the requests that it preempts for this; so do the sums."""
        done = super().reset_prefix_cache(*args, **kwargs)
        if not done and self.segment_book.settings.keeps:
            self._segment_forget_prefixes()
        for key, request in self.requests.items():
            in_flight = self._segment_in_flight(key)
            if in_flight and _drops_output(request):
                self.segment_logprobs.ended(key, in_flight)
            elif not in_flight and getattr(request, "discard_latest_async_tokens", False):
                # vLLM < 0.23 would drop the next token instead, which the model has already gone on from.
                request.discard_latest_async_tokens = False
        return done

    def _segment_forget_prefixes(self) -> None:
        """New requests must not find KV of older weights: upstream refuses to reset the cache while anything uses it.

        Kept requests go on with their blocks; only the hashes by which others would find them go. Blocks that they fill
        from now on get none: they are computed from old KV, the rest of a prompt between two prefill chunks as well. A
        request that upstream preempts starts anew and is forgotten here.
        """
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.num_cached_block.update((key, sys.maxsize) for key, held in manager.req_to_blocks.items() if held)

    def _segment_in_flight(self, key: str) -> int:
        """Scheduled tokens of a request whose output has not come yet.

        Counted here: vLLM < 0.28 knows them only as placeholders, without prefill chunks and under async scheduling.
        """
        return sum(step.get(key, 0) for step in self.segment_flight)

    def update_from_output(self, scheduler_output, model_runner_output):
        flight, scheduled = self.segment_flight, scheduler_output.num_scheduled_tokens
        while flight and flight.popleft() is not scheduled:
            continue  # oldest first; a step that was scheduled but never executed is forgotten here
        # Before upstream frees what ends in this step, so that the last token is in the sum.
        self.segment_occupancy.window.tokens += self.segment_logprobs.add(
            model_runner_output, scheduled, self.requests,
            one_each=scheduler_output.total_num_scheduled_tokens == len(scheduled))
        self.segment_before = {key: self.requests[key].num_output_tokens for key in self.segment_logprobs.several
                               if key in self.requests}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        book = self.segment_book
        due = book.advance()
        self.segment_occupancy.stepped(
            len(scheduled), scheduler_output.total_num_scheduled_tokens <= self.segment_most_decoded * len(scheduled))
        if due or book.pending:
            self._segment_act(due, outputs)
        if not self.requests:
            self.segment_occupancy.observe(0, 0)
        return outputs

    def _segment_act(self, due, outputs) -> None:
        endings = {}
        book, requests, logprobs_of = self.segment_book, self.requests, self.segment_logprobs.of
        for key in due:
            request = requests.get(key)
            if request is not None:
                decision = book.look(key, request._output_token_ids, logprobs_of(key))
                if decision.outcome != CONTINUE:
                    endings[key] = decision
        if book.pending:
            endings |= book.take_pending(lambda key: requests[key].num_output_tokens if key in requests else 1)
        for key, ending in endings.items():
            if key in self.requests:
                self._segment_end(self.requests[key], ending.outcome, ending.rule, outputs)

    def _segment_end(self, request, outcome: str, rule: str, outputs) -> None:
        """End a request now, as length-capped: "abort" would make verl resume it."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        key, client = request.request_id, request.client_index
        request.stop_reason = STOP_REASON[outcome]
        payload = self._segment_payload(request, outcome, rule)
        self.finish_requests([key], RequestStatus.FINISHED_LENGTH_CAPPED)  # AscendScheduler would iterate a str
        if client not in outputs:
            outputs[client] = EngineCoreOutputs(outputs=[])
        output = next((o for o in outputs[client].outputs if o.request_id == key), None)
        if output is None:  # no token in this step: waiting, preempted, or between two prefill chunks
            output = EngineCoreOutput(request_id=key, new_token_ids=[])
            outputs[client].outputs.append(output)
        output.finish_reason = request.get_finished_reason()
        output.stop_reason = request.stop_reason
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), PAYLOAD: payload}

    def finish_requests(self, request_ids, *args, **kwargs):
        self.segment_all_at_once = request_ids is None
        try:
            return super().finish_requests(request_ids, *args, **kwargs)
        finally:
            self.segment_all_at_once = False

    def _free_request(self, request, *args, **kwargs):
        key = request.request_id
        self.segment_logprobs.ended(key, self._segment_in_flight(key))
        if key in self.segment_before:  # an accepted draft may hold the end: upstream trims what follows it
            kept = request.num_output_tokens - self.segment_before.pop(key)
            self.segment_occupancy.window.tokens -= self.segment_logprobs.trim(key, kept)
        freed = super()._free_request(request, *args, **kwargs)
        aborted = str(request.get_finished_reason()) == "abort"
        payload = self._segment_payload(request, Outcome.ABORT if aborted else Outcome.FINISH, "")
        if payload is None:
            return freed
        if isinstance(freed, tuple):  # vLLM >= 0.28: (kv, ec) parameters
            return ({**(freed[0] or {}), PAYLOAD: payload}, *freed[1:])
        return {**(freed or {}), PAYLOAD: payload}

    def _segment_payload(self, request, outcome: str, rule: str) -> dict | None:
        """Closes the book on a request; None when it is not, or no longer, tracked. msgpack-plain."""
        item = self.segment_book.close(request.request_id, request.num_output_tokens, outcome == Outcome.FINISH)
        if item is None:
            return None
        # of one with stop strings that is named to be aborted the front end has found one: it has ended
        stopped = outcome == Outcome.ABORT and item.stays and not self.segment_all_at_once
        self.segment_outcomes[f"{outcome}/{rule}" if rule else Outcome.FINISH if stopped else outcome] += 1
        self.segment_occupancy.ended(*self.segment_logprobs.of(request.request_id))
        marks = self.segment_book.carried_marks(item, request.num_output_tokens, self.segment_logprobs.of(
            request.request_id)) if outcome == YIELD else []
        payload = {"outcome": str(outcome), "rule": str(rule), "spans": item.spans, "boundaries": item.boundaries,
                   "replica": self.segment_replica, "arrived": request.arrival_time,
                   "logprob_sum": self.segment_logprobs.pop(request.request_id), "marks": marks,
                   "surprisal": item.surprisal}
        if outcome == Outcome.ABORT and not stopped:
            self.segment_occupancy.aborted((item.group, item.member))
        if item.spans and (outcome == Outcome.ABORT or item.stays):
            self.segment_books[item.group, item.member, item.attempt] = payload
            while len(self.segment_books) > BOOKS_KEPT:
                self.segment_books.popitem(last=False)
        return payload

    # Control plane, called by the EngineCore utilities between two steps.

    def segment_set_version(self, version: int) -> dict:
        """New weights are in; returns the window that ends with them."""
        book = self.segment_book
        kept = {key: self.requests[key] for key in book.tracked}
        window = dataclasses.asdict(self.segment_occupancy.close())
        window["version"], window["replica"] = book.version, self.segment_replica
        window["outcomes"] = dict(self.segment_outcomes)
        window["in_flight"] = sum(map(len, self.segment_flight))  # a pause settles them; else they count as new
        ages = book.kv_ages(version, {key: (request.num_computed_tokens > 0, getattr(request, "num_preemptions", 0))
                                      for key, request in kept.items()})
        window["kept"], window["held"] = len(ages), self.segment_headroom.take_held()
        window["kv_ages"] = [list(pair) for pair in sorted(Counter(ages).items())]  # [weight versions, responses]
        self.segment_outcomes.clear()
        book.set_version(version, {key: request.num_output_tokens for key, request in kept.items()})
        return window

    def segment_take_book(self, group: str, member: int, attempt: int) -> dict | None:
        """What the book knew of this attempt, if it was aborted or has stop strings; asked once."""
        return self.segment_books.pop((group, member, attempt), None)

    def segment_finish(self, group: str, members, rule: str) -> int:
        return self.segment_book.ask_finish(group, members, rule)

    def segment_hand_back(self, count: int) -> tuple[int, list[str]]:
        """Hand `count` requests back, so that their clients go on with them elsewhere; returns how many there were, and
        those of them that only the front end can: without a token of their own, of no group, or with stop strings."""
        leaving = cheapest_to_move({key: request.num_tokens for key, request in self.requests.items()}, count)
        return len(leaving), [key for key in leaving
                              if not self.requests[key].num_output_tokens or not self.segment_book.hand_back(key)]

    def segment_progress(self, group: str) -> dict[int, int]:
        """Tokens of the whole response so far, earlier attempts included, of every member that is here."""
        book = self.segment_book
        return {member: book.tracked[key].done_before + self.requests[key].num_output_tokens
                for member, key in book.members_of(group).items()}

    def segment_take_looks(self, groups) -> dict[str, dict[int, list[list]]]:
        """New looks at responses of these groups, each once."""
        return self.segment_book.looks.take(groups)

    def segment_set_length(self, group: str, length: int, tail: bool) -> int:
        """Segments of this group have `length` tokens from now on; returns how many of its responses are here."""
        book = self.segment_book
        return book.set_segment_length(group, length, tail, {
            key: self.requests[key].num_output_tokens for key in book.keys_of(group)})
