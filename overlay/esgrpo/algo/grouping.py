"""Groups of responses as one agent-loop worker sees them. Pure state machine: events in, actions out."""

from __future__ import annotations

from dataclasses import dataclass, field

RUNNING, FINISHED, PRUNED, FAILED = "running", "finished", "pruned", "failed"
CARRIED = "carried"  # interrupted and handed back: it goes on later, perhaps under another coordinator


class GroupCollision(ValueError):
    """Two different prompts share a group id while both are running, or two members a number."""


@dataclass
class Group:
    size: int
    members: dict[int, str] = field(default_factory=dict)  # member -> state


class GroupCoordinator:
    """Owns the state of every running group.

    Invariants: a member joins once and leaves once; a group disappears when its last member has left. Who is pruned
    is decided by `esgrpo.algo.group_pruning`, never here.
    """

    def __init__(self):
        self.groups: dict[str, Group] = {}

    def reopen(self, group_id: str, size: int, ended: dict[int, str]) -> None:
        """A group comes back with the members that have ended elsewhere; the others join again, by number.

        Raises GroupCollision when the group is running here.
        """
        if group_id in self.groups:
            raise GroupCollision(group_id)
        if len(ended) < size:
            self.groups[group_id] = Group(size, dict(ended))

    def join(self, group_id: str, size: int, number: int | None = None) -> int:
        """A member starts; returns its number: the one it had before, or 0 .. size - 1 in order of arrival.

        Raises GroupCollision when the group already has `size` members, or a member of this number.
        """
        group = self.groups.setdefault(group_id, Group(size))
        member = len(group.members) if number is None else number
        if len(group.members) >= group.size or member in group.members:
            raise GroupCollision(group_id)
        group.members[member] = RUNNING
        return member

    def leave(self, group_id: str, member: int, outcome: str) -> None:
        """A member ended as finished, pruned, failed or carried. Raises ValueError when it had ended before."""
        group = self.groups[group_id]
        if group.members[member] != RUNNING:
            raise ValueError(f"member {member} of {group_id} ended twice")
        group.members[member] = outcome
        if RUNNING not in group.members.values() and len(group.members) == group.size:
            del self.groups[group_id]
