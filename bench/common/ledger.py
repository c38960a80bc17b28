"""Where every decoded token went. The replicas count tokens when they are made, the ledger when their fate is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bench.common.workload import Sample

CAUSES = ("zero_variance", "pruned", "discarded", "left_over")


class Ledger:
    """Response tokens by fate. `trained`: in an update, with a gradient; otherwise a cause:

    zero_variance  in an update, but all finished samples of the group agree: no gradient
    pruned         ended for good before its end, and left out
    discarded      thrown away to be decoded again, or a spare sample that was not needed
    left_over      decoded, but not trained when the run ended

    Invariants: a token has one fate; a group is trained once, with `members` samples that ended. `trains_cut`: a sample
    that was cut is trained as the failure that it is, as far as it came.

    `version` is the driver's to count: weight updates so far. `staleness`: of every trained group, the versions between
    the first submission of the attempt that was trained and its update (0: on-policy). `spans`: of every response that
    is not trained, which version decoded which of its tokens, as (version, tokens up to there).
    """

    def __init__(self, members: int, trains_cut: bool = False):
        self.members, self.trains_cut = members, trains_cut
        self.trained = self.trained_samples = self.pruned_samples = self.gradient_groups = 0
        self.waste = dict.fromkeys(CAUSES, 0)
        self.held: dict[int, int] = {}  # sample key -> tokens of a response that is not running and not whole
        self.ended: dict[int, list[Sample]] = {}  # group -> samples that finished, in this order
        self.cut: dict[int, int] = {}  # group -> pruned samples
        self.closed: set[int] = set()
        self.version = 0
        self.born: dict[int, int] = {}  # group -> version of its first submission
        self.staleness: list[int] = []
        self.spans: dict[int, list[tuple[int, int]]] = {}  # sample key -> its spans
        self.row_ages = self.stale_rows = 0  # trained rows: versions of their oldest tokens, rows with a stale token
        self.trained_tokens = self.token_ages = self.stale_tokens = 0
        self._over: set[int] = set()  # keys of samples that ended

    def resumes(self, sample: Sample, done: int) -> None:
        """A response is submitted. Raises ValueError when it brings other tokens than it was left with, or ended."""
        if sample.key in self._over:
            raise ValueError(f"sample {sample.key} was submitted after its end")
        self.born.setdefault(sample.group, self.version)
        held = self.held.pop(sample.key, 0)
        if held != done:
            raise ValueError(f"sample {sample.key} is submitted with {done} tokens, it has {held}")

    def reached(self, sample: Sample, tokens: int, version: int | None = None) -> None:
        """The response has so many tokens: the new ones are those of `version` (None: of the weights of now)."""
        spans = self.spans.setdefault(sample.key, [])
        version = self.version if version is None else version
        if tokens > (spans[-1][1] if spans else 0):
            if spans and spans[-1][0] == version:
                spans.pop()
            spans.append((version, tokens))

    def stopped(self, sample: Sample, tokens: int, keep: bool, version: int | None = None) -> None:
        if keep:
            self.held[sample.key] = tokens
            self.reached(sample, tokens, version)
        else:
            self.waste["discarded"] += tokens
            self.spans.pop(sample.key, None)

    def finished(self, sample: Sample) -> int:
        """Returns how many samples of the group have ended."""
        self._over.add(sample.key)
        self.reached(sample, sample.tokens)
        if sample.group in self.closed:  # a spare one
            self.waste["discarded"] += sample.tokens
            del self.spans[sample.key]
        else:
            self.ended.setdefault(sample.group, []).append(sample)
        return self.count(sample.group)

    def prunes(self, sample: Sample, tokens: int) -> int:
        self._over.add(sample.key)
        self.held.pop(sample.key, None)
        self.pruned_samples += 1
        if self.trains_cut and tokens:
            self.reached(sample, tokens)
            self.ended.setdefault(sample.group, []).append(dataclasses.replace(sample, tokens=tokens, correct=False))
            return self.count(sample.group)
        self.spans.pop(sample.key, None)
        self.waste["pruned"] += tokens
        self.cut[sample.group] = self.cut.get(sample.group, 0) + 1
        return self.count(sample.group)

    def restart(self, group: int) -> None:
        """All that a group has finished is thrown away. Raises ValueError for one that was trained."""
        if group in self.closed:
            raise ValueError(f"group {group} was trained and is decoded again")
        self.born.pop(group, None)
        thrown = self.ended.pop(group, [])
        for sample in thrown:
            self.spans.pop(sample.key, None)
        self.waste["discarded"] += sum(sample.tokens for sample in thrown)

    def count(self, group: int) -> int:
        return len(self.ended.get(group, ())) + self.cut.get(group, 0)

    def train(self, groups: Iterable[int]) -> None:
        """Raises ValueError for a group that was trained before or is not whole."""
        for group in groups:
            if group in self.closed or self.count(group) < self.members:
                raise ValueError(f"group {group} has {self.count(group)} of {self.members} samples, "
                                 f"trained before: {group in self.closed}")
            self.closed.add(group)
            self.staleness.append(self.version - self.born[group])
            samples = self.ended.pop(group, [])
            needed = self.members - self.cut.pop(group, 0)
            used, spare = samples[:needed], samples[needed:]
            gradient = len({sample.correct for sample in used}) > 1
            tokens = sum(sample.tokens for sample in used)
            if gradient:
                self.trained += tokens
                self.gradient_groups += 1
            else:
                self.waste["zero_variance"] += tokens
            self.trained_samples += len(used)
            self._age(used, samples)
            self.waste["discarded"] += sum(sample.tokens for sample in spare)

    def _age(self, used: Iterable[Sample], samples: Iterable[Sample]) -> None:
        """How old the tokens of trained rows are at their update; forgets `samples`, the used ones among them."""
        for sample in used:
            spans, before = self.spans[sample.key], 0
            oldest = self.version - spans[0][0]
            self.row_ages += oldest
            self.stale_rows += oldest > 0
            for version, tokens in spans:
                self.token_ages += (self.version - version) * (tokens - before)
                self.stale_tokens += (tokens - before) * (version < self.version)
                before = tokens
            self.trained_tokens += before
        for sample in samples:
            self.spans.pop(sample.key, None)

    def stale(self) -> dict[str, float | dict]:
        """Versions that trained groups are old; `share`: of them that are not on-policy. `rows` and `tokens` likewise:
        a row is as old as its oldest token, a token as old as the weights that decoded it."""
        count, rows, tokens = max(1, len(self.staleness)), max(1, self.trained_samples), max(1, self.trained_tokens)
        return {"mean": sum(self.staleness) / count, "max": max(self.staleness, default=0),
                "share": sum(age > 0 for age in self.staleness) / count,
                "rows": {"mean": self.row_ages / rows, "share": self.stale_rows / rows},
                "tokens": {"mean": self.token_ages / tokens, "share": self.stale_tokens / tokens}}

    def close(self, decoded: int) -> None:
        """The run is over, nothing runs. Raises AssertionError when a token of `decoded` has no fate, or two."""
        self.waste["left_over"] += sum(self.held.values())
        self.waste["left_over"] += sum(sample.tokens for samples in self.ended.values() for sample in samples)
        for kept in (self.held, self.ended, self.spans):
            kept.clear()
        if decoded != self.trained + sum(self.waste.values()):
            raise AssertionError(f"{decoded} tokens were decoded, {self.trained} trained and {self.waste} wasted")
