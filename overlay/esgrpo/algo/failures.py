"""When failed prompt groups mean that nothing works any more. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

MOST_IN_A_ROW = 32  # failed groups without one that ended well: a dead engine or a reward function that always raises
FEWEST_ALLOWED = 1  # failed prompts of a weight version where any are: one of them never ends a run
NAMES_SHOWN = 3
ERROR_CHARACTERS = 200

# Class names, wherever they stand among the bases of an error: what was to answer is gone, no other prompt would fare
# better. Ray's errors but RayTaskError, which stands for the error of somebody's code; vLLM's dead engine; our own.
PROCESS_GONE = frozenset({"RayError", "EngineDeadError", "EsgrpoError", "MemoryError"})


def is_of_one_prompt(error: BaseException) -> bool:
    """Did the code that was given this prompt (reward, tool, template) raise, with every process alive?"""
    return not PROCESS_GONE & {base.__name__ for base in type(cause(error)).__mro__}


def cause(error: BaseException) -> BaseException:
    """What was raised in the worker, where Ray hands it over inside an error of its own."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def first_of(error: BaseException | None, kind: type[BaseException]):
    """The first error of `kind` in the chain of causes, as it was raised, or None: Ray's own error is of the kind of
    its cause, too, with tracebacks for a text."""
    while error is not None:
        while cause(error) is not error:
            error = cause(error)
        if isinstance(error, kind):
            return error
        error = error.__cause__
    return None


def brief(error: BaseException) -> str:
    """Class and first line of what was raised."""
    raised = cause(error)
    lines = [line.strip() for line in str(raised).splitlines() if line.strip()]
    return f"{type(raised).__name__}: {lines[0] if lines else 'without a message'}"[:ERROR_CHARACTERS]


@dataclass(frozen=True)
class Failed:
    """A prompt group that failed: its id in this run, words by which a user finds the prompt, and the error."""

    group: str
    prompt: str
    error: str


class FailedPrompts:
    """Holds the prompts that fail within one weight version to a share of the version's prompts.

    `share` 0 allows none; any other share allows at least one. Invariant: `failed` has every group of the version once.
    """

    def __init__(self, share: float, prompts: int):
        self.allowed = max(FEWEST_ALLOWED, int(share * prompts)) if share else 0
        self.failed: dict[str, Failed] = {}
        self.total = 0
        self._version: Hashable = None

    def observe(self, version: Hashable, failures: Iterable[Failed]) -> list[Failed]:
        """Takes failures of this version, known ones too; returns the new ones."""
        if version != self._version:
            self._version, self.failed = version, {}
        new = [failure for failure in failures if failure.group not in self.failed]
        self.failed.update((failure.group, failure) for failure in new)
        self.total += len(new)
        return new

    @property
    def too_many(self) -> bool:
        return len(self.failed) > self.allowed

    def __str__(self) -> str:
        """The latest error, and the prompts of this version, the latest first."""
        failures = list(self.failed.values())[::-1]
        more = f" and {len(failures) - NAMES_SHOWN} more" if len(failures) > NAMES_SHOWN else ""
        return (f"{failures[0].error}; {len(failures)} prompts of one weight version failed: "
                + ", ".join(failure.prompt for failure in failures[:NAMES_SHOWN]) + more)


class FailureStreak:
    """Counts groups that failed since the last one that ended well.

    Invariant: `in_a_row` is the number of distinct groups named as failed after the latest new name among the good.
    """

    def __init__(self, limit: int = MOST_IN_A_ROW):
        self.limit, self.in_a_row = limit, 0
        self._good: frozenset[str] = frozenset()

    def observe(self, failed: Collection[str], good: Collection[str]) -> bool:
        """Takes the groups that failed since the last call and all that wait complete; True when it is enough."""
        new = frozenset(good) - self._good
        self._good = frozenset(good)
        self.in_a_row = len(failed) if new else self.in_a_row + len(failed)
        return self.in_a_row >= self.limit
