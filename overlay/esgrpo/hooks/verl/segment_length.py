"""Tells the engines a group's segment length when one of its members has ended. Called by run_member."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Told:
    """What this worker knows of a group's segments."""

    segments: object  # algo.elastic.Segments that the engines were told last
    finished: list[int] = field(default_factory=list)  # lengths of the members that have ended, tokens


async def after_leave(worker, group: str, coordinator, member=None) -> None:
    """Bring the segment length of `group` up to date in every engine, when it changes; else nothing is sent.

    `worker` is the AgentLoopWorker, `member` the attempts.Member that has just left; its length stands in for a
    forecast that its siblings do not have. A group whose members have all ended needs nothing.
    """
    from esgrpo import config
    from esgrpo.algo.elastic import Segments

    settings = config.current()
    if not (settings.enable and settings.elastic.enable):
        return
    groups = vars(worker).setdefault("esgrpo_segments", {})
    for ended in [name for name in groups if name not in coordinator.groups]:
        del groups[ended]
    if group not in coordinator.groups:
        return
    told = groups.setdefault(group, Told(Segments(settings.segment_length, False)))
    if member is not None:
        told.finished.append(member.tokens)
    if not told.segments.tail and _running(worker, group):  # nobody leaves the tail class
        await _tell(worker, group, coordinator, settings, told)


def _running(worker, group: str) -> list:
    return [member for (name, _), member in worker.esgrpo_members.items() if name == group]


async def _tell(worker, group: str, coordinator, settings, told: Told) -> None:
    from esgrpo.algo.elastic import next_segments
    from esgrpo.algo.grouping import RUNNING
    from esgrpo.algo.segments import TAIL
    from esgrpo.hooks.verl.group_members import servers_of
    from esgrpo.hooks.verl.server_calls import answers_if_any
    from esgrpo.hooks.verl.server_control import methods

    servers = await servers_of(worker)
    progress = {number: tokens for part in await answers_if_any(
        [call.remote(group) for call in methods(servers, "esgrpo_progress")], "progress", "segments keep their length")
        for number, tokens in part.items()}
    # From here to the calls nothing is awaited: of two members that left at once, the later one has the last word.
    known, running = coordinator.groups.get(group), _running(worker, group)
    if known is None or not running:
        return
    ended = sum(state != RUNNING for state in known.members.values())
    segments = next_segments(settings.elastic, told.segments, 1.0 - ended / known.size,
                             predicted(running, progress, told.finished, worker.rollout_config.response_length))
    if segments == told.segments:
        return
    told.segments = segments
    if segments.tail:
        for member in running:
            member.length_class = TAIL
    await answers_if_any([call.remote(group, segments.length, segments.tail)
                          for call in methods(servers, "esgrpo_set_segment_length")],
                         "set_segment_length", "segments keep their length")


def predicted(running, progress: dict[int, int], finished: list[int], budget: int) -> float:
    """Mean predicted remainder of the running members, tokens. A member between two attempts has what it brought."""
    from esgrpo.algo.elastic import remaining_tokens

    return sum(remaining_tokens(progress.get(member.number, member.tokens), member.forecast, finished, budget)
               for member in running) / len(running)
