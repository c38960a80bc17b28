"""What happens to a group, what is to be done about it, and what is written of it: the words of `algo/rollout.py`."""

from __future__ import annotations

from dataclasses import dataclass

from esgrpo.algo.rows import Response as Row
from esgrpo.algo.terms import Outcome
from esgrpo.algo.verdict_features import Glance

# Events


@dataclass(frozen=True)
class Submitted:
    """`member` is None for one that begins: it gets the next number. `state` comes back with an interrupted one."""

    group: str
    size: int
    now: float
    member: int | None = None
    forecast: dict | None = None
    prompt: str | None = None  # key of its content
    state: dict | None = None
    version: int | None = None  # where no attempt lives through a weight sync: all its tokens are of this version


@dataclass(frozen=True)
class Reopened:
    group: str
    size: int
    ended: dict[int, Outcome]


@dataclass(frozen=True)
class Placed:
    group: str
    member: int
    replica: object


@dataclass(frozen=True)
class AttemptEnded:
    """`answer` is what the replica's book said (`SegmentMixin._segment_payload`); None where it was not asked."""

    group: str
    member: int
    now: float
    tokens: int
    left: int  # tokens of the response budget after this attempt
    aborted: bool = False  # the client submits it again by itself
    answer: dict | None = None
    version: int | None = None  # of the weights, as the server says it when the answer is read
    prefilled: int = 0  # prompt and response tokens that were computed for it


@dataclass(frozen=True)
class Sealed:
    group: str
    member: int
    now: float


@dataclass(frozen=True)
class MemberEnded:
    """`score` is None where rewards come later; `carried`: interrupted and handed back, to go on elsewhere."""

    group: str
    member: int
    now: float
    score: float | None = None
    acc: object = None  # correctness as the reward function reports it
    failed: bool = False
    carried: bool = False


@dataclass(frozen=True)
class Progress:
    """Tokens of the whole response so far, of the group's members that decode on a replica which answered."""

    group: str
    tokens: dict[int, int]


@dataclass(frozen=True)
class Looked:
    """Looks at members that decode somewhere (algo/looks.py)."""

    group: str
    looks: dict[int, list[Glance]]  # of each member those since the last message, oldest first


@dataclass(frozen=True)
class Taught:
    """Answer to Teach: what all workers know (`Verdicts.to_state`)."""

    state: dict


@dataclass(frozen=True)
class Learned:
    """`state` replaces what is known here: it holds all of it."""

    lessons: list
    state: dict | None = None


# Actions


@dataclass(frozen=True)
class Submit:
    """Submit an attempt of this member with `fields` in its request; msgpack-plain."""

    group: str
    member: int
    fields: dict
    versions: tuple[int, int] | None = None  # first and last of the attempt before


@dataclass(frozen=True)
class HandOn:
    """Give the response to whoever asked for it. `stop_reason` None: as the server said."""

    group: str
    member: int
    stop_reason: str | None = None
    versions: tuple[int, int] | None = None  # first and last weight version of the attempt's tokens


@dataclass(frozen=True)
class Ask:
    """How far are the members of this group? Asked are the replicas that hold one, nobody else."""

    group: str
    replicas: tuple


@dataclass(frozen=True)
class Finish:
    """End these members with the tokens they have."""

    group: str
    rule: str
    members: dict[object, tuple[int, ...]]  # replica -> numbers


@dataclass(frozen=True)
class JoinTail:
    """What runs of this group is of the tail class: at the next multiple of `length` tokens it may change replicas."""

    group: str
    length: int
    replicas: tuple


@dataclass(frozen=True)
class Record:
    """Write this row; it travels with the response to the trainer."""

    group: str
    member: int
    row: Row


@dataclass(frozen=True)
class Share:
    """Outcomes that the audits of other workers have not seen."""

    lessons: list


@dataclass(frozen=True)
class Teach:
    """What the learned verdicts saw since the last weight sync; None: this worker begins."""

    lessons: list | None


Action = Submit | HandOn | Ask | Finish | JoinTail | Record | Share | Teach
