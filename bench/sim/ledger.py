"""Where every decoded token went. The replicas count tokens when they are made, the ledger when their fate is known."""

from __future__ import annotations

from collections.abc import Iterable

from bench.workload import Sample

CAUSES = ("zero_variance", "pruned", "discarded", "left_over")


class Ledger:
    """Response tokens by fate. `trained`: in an update, with a gradient; otherwise a cause:

    zero_variance  in an update, but all finished samples of the group agree: no gradient
    pruned         ended for good before its end
    discarded      thrown away to be decoded again, or a spare sample that was not needed
    left_over      decoded, but not trained when the run ended

    Invariants: a token has one fate; a group is trained once, with `members` samples that ended.

    `version` is the driver's to count: weight updates so far. `staleness`: of every trained group, the versions between
    the first submission of the attempt that was trained and its update (0: on-policy).
    """

    def __init__(self, members: int):
        self.members = members
        self.trained = self.trained_samples = self.pruned_samples = self.gradient_groups = 0
        self.waste = dict.fromkeys(CAUSES, 0)
        self.held: dict[int, int] = {}  # sample key -> tokens of a response that is not running and not whole
        self.ended: dict[int, list[Sample]] = {}  # group -> samples that finished, in this order
        self.cut: dict[int, int] = {}  # group -> pruned samples
        self.closed: set[int] = set()
        self.version = 0
        self.born: dict[int, int] = {}  # group -> version of its first submission
        self.staleness: list[int] = []
        self._over: set[int] = set()  # keys of samples that ended

    def resumes(self, sample: Sample, done: int) -> None:
        """A response is submitted. Raises ValueError when it brings other tokens than it was left with, or ended."""
        if sample.key in self._over:
            raise ValueError(f"sample {sample.key} was submitted after its end")
        self.born.setdefault(sample.group, self.version)
        held = self.held.pop(sample.key, 0)
        if held != done:
            raise ValueError(f"sample {sample.key} is submitted with {done} tokens, it has {held}")

    def stopped(self, sample: Sample, tokens: int, keep: bool) -> None:
        if keep:
            self.held[sample.key] = tokens
        else:
            self.waste["discarded"] += tokens

    def finished(self, sample: Sample) -> int:
        """Returns how many samples of the group have ended."""
        self._over.add(sample.key)
        if sample.group in self.closed:  # a spare one
            self.waste["discarded"] += sample.tokens
        else:
            self.ended.setdefault(sample.group, []).append(sample)
        return self.count(sample.group)

    def prunes(self, sample: Sample, tokens: int) -> int:
        self._over.add(sample.key)
        self.held.pop(sample.key, None)
        self.waste["pruned"] += tokens
        self.pruned_samples += 1
        self.cut[sample.group] = self.cut.get(sample.group, 0) + 1
        return self.count(sample.group)

    def restart(self, group: int) -> None:
        """All that a group has finished is thrown away. Raises ValueError for one that was trained."""
        if group in self.closed:
            raise ValueError(f"group {group} was trained and is decoded again")
        self.born.pop(group, None)
        self.waste["discarded"] += sum(sample.tokens for sample in self.ended.pop(group, ()))

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
            self.waste["discarded"] += sum(sample.tokens for sample in spare)

    def stale(self) -> dict[str, float]:
        """Versions that trained groups are old; `share`: of them that are not on-policy."""
        count = max(1, len(self.staleness))
        return {"mean": sum(self.staleness) / count, "max": max(self.staleness, default=0),
                "share": sum(age > 0 for age in self.staleness) / count}

    def close(self, decoded: int) -> None:
        """The run is over, nothing runs. Raises AssertionError when a token of `decoded` has no fate, or two."""
        self.waste["left_over"] += sum(self.held.values())
        self.waste["left_over"] += sum(sample.tokens for samples in self.ended.values() for sample in samples)
        self.held.clear()
        self.ended.clear()
        if decoded != self.trained + sum(self.waste.values()):
            raise AssertionError(f"{decoded} tokens were decoded, {self.trained} trained and {self.waste} wasted")
