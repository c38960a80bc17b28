"""Groups of responses as one agent-loop worker sees them. Pure state machine: events in, actions out."""

from __future__ import annotations

from dataclasses import dataclass, field

RUNNING, FINISHED, PRUNED, FAILED = "running", "finished", "pruned", "failed"


class GroupCollision(ValueError):
    """Two different prompts share a group id while both are running."""


@dataclass
class Group:
    size: int
    members: dict[int, str] = field(default_factory=dict)  # member -> state
    asked: set[int] = field(default_factory=set)  # members that replicas were asked to finish


class GroupCoordinator:
    """Owns the state of every running group.

    Invariants: a member joins once and leaves once; a group disappears when its last member has left; a finish is
    asked for at most once per member.
    """

    def __init__(self, finish_after: int = 0):
        self.finish_after = finish_after
        self.groups: dict[str, Group] = {}

    def join(self, group_id: str, size: int) -> int:
        """A member starts; returns its number, 0 .. size - 1 in order of arrival.

        Raises GroupCollision when the group already has `size` members.
        """
        group = self.groups.setdefault(group_id, Group(size))
        if len(group.members) >= group.size:
            raise GroupCollision(group_id)
        member = len(group.members)
        group.members[member] = RUNNING
        return member

    def leave(self, group_id: str, member: int, outcome: str) -> list[int]:
        """A member ended as finished, pruned or failed; returns the members that should be finished now."""
        group = self.groups[group_id]
        if group.members[member] != RUNNING:
            raise ValueError(f"member {member} of {group_id} ended twice")
        group.members[member] = outcome
        running = [m for m, state in group.members.items() if state == RUNNING]
        if not running and len(group.members) == group.size:
            del self.groups[group_id]
            return []
        finished = sum(state == FINISHED for state in group.members.values())
        if not self.finish_after or finished < self.finish_after:
            return []
        ask = [m for m in running if m not in group.asked]
        group.asked.update(ask)
        return ask

    def is_asked(self, group_id: str, member: int) -> bool:
        group = self.groups.get(group_id)
        return group is not None and member in group.asked
