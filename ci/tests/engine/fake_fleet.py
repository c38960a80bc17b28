"""Replicas without an engine for the benchmark's driver: a step gives a token to everyone who runs, as the real ones
do, and takes next to no time. Commands, events and counters are those of bench.engine.replica."""

from __future__ import annotations

import time


class FakeReplica:
    def __init__(self, sequences: int, lag: int):
        self.sequences, self.lag, self.lost = sequences, lag, 0
        self.commands: list[tuple] = []
        self.do_reset({})

    def do_reset(self, _segment):
        self.requests: dict[str, dict] = {}
        self.events, self.steps, self.decoded, self.resume_at, self.ticks = [], 0, 0, None, 0
        self.tell("reset")

    def tell(self, kind, *values):
        self.events.append((kind, time.monotonic(), *values))

    def do_submit(self, sample, prompt, response, target, boundary):
        assert sample not in self.requests
        self.requests[sample] = {"done": len(response), "target": target, "boundary": boundary, "tokens": [],
                                 "ending": None}

    def do_tell(self, sample, segment):
        request = self.requests.get(sample)
        if request:
            place = request["done"] + len(request["tokens"]) + segment
            request["boundary"] = min(place, request["boundary"] or place)

    def do_segment(self, sample, boundary):
        if sample in self.requests:
            self.requests[sample]["boundary"] = boundary

    def do_yield(self, sample):
        if sample in self.requests:
            self.requests[sample]["ending"] = "yield"

    def do_prune(self, sample, _rule):
        if sample in self.requests:
            self.requests[sample]["ending"] = "prune"

    def do_abort(self, sample):
        if sample in self.requests:
            self.end(sample, "abort")

    def do_sync(self, mode, seconds):
        if mode == "abort":
            for sample in list(self.requests):
                self.end(sample, "abort")
        self.resume_at = time.monotonic() + seconds

    def do_counters(self):
        self.tell("counters", {"decoded": self.decoded - self.lost, "preemptions": 0, "preempted_tokens": 0,
                               "computed": self.decoded, "steps": self.steps})

    def end(self, sample, outcome):
        self.tell("end", sample, outcome, self.requests.pop(sample)["tokens"], 0)

    def step(self):
        """One token for whoever runs; commands come `lag` steps late."""
        self.ticks += 1
        if self.ticks % (self.lag + 1) == 0:
            for name, *arguments in self.commands:
                getattr(self, f"do_{name}")(*arguments)
            self.commands = []
        if self.resume_at is not None and time.monotonic() >= self.resume_at:
            self.resume_at = None
            self.tell("resumed")
        running = [] if self.resume_at is not None else list(self.requests)[:self.sequences]
        self.steps += bool(running)
        for sample in running:
            request = self.requests[sample]
            if not request["tokens"]:
                self.tell("first", sample)
            request["tokens"].append(7)
            self.decoded += 1
            total = request["done"] + len(request["tokens"])
            if total == request["target"]:
                self.end(sample, "finish")
            elif request["ending"]:
                self.end(sample, request["ending"])
            elif request["boundary"] is not None and total >= request["boundary"]:
                request["boundary"] = None
                self.tell("boundary", sample, total)

    def message(self):
        events, self.events = self.events, []
        running = 0 if self.resume_at is not None else min(len(self.requests), self.sequences)
        load = (running, len(self.requests) - running, self.resume_at is not None)
        return time.monotonic(), load, 1000, self.steps, events


class FakeFleet:
    def __init__(self, replicas: int, sequences: int, lag: int = 0):
        self.replicas = [FakeReplica(sequences, lag) for _ in range(replicas)]

    def send(self, number, commands):
        self.replicas[number].commands += commands

    def poll(self, _seconds):
        for replica in self.replicas:
            replica.step()
        return [(number, replica.message()) for number, replica in enumerate(self.replicas)]

    def ask(self, command, answer):
        for replica in self.replicas:
            replica.commands.append(command)
        found = {}
        while len(found) < len(self.replicas):
            for number, (*_, events) in self.poll(0):
                for kind, _, *values in events:
                    if kind == answer:
                        found[number] = values
        return [found[number] for number in range(len(self.replicas))]
