"""What the audits of several workers learned, brought together: each hears what it has not heard. Pure."""

from __future__ import annotations

from collections import deque

from esgrpo.algo.group_pruning import GroupPruner

LESSONS_KEPT = 10_000  # a worker that was silent for so long gets the whole state instead


class LessonPool:
    """Invariant: after an exchange a worker has taken in each lesson once, its own ones at home, or the whole state."""

    def __init__(self, pruner: GroupPruner):
        self._pruner = pruner  # takes in everything; decides nothing
        self._log: deque[tuple[int, list]] = deque(maxlen=LESSONS_KEPT)  # (author, lesson)
        self._count = 0  # lessons ever
        self._heard: dict[int, int] = {}  # worker -> lessons that it knows

    def exchange(self, worker: int, lessons: list) -> tuple[list, dict | None]:
        """(lessons of the others since the last call, None), or ([], the whole state) for whoever cannot be told so."""
        self._pruner.absorb(lessons)
        begin = self._count - len(self._log)
        heard = self._heard.get(worker)
        known = heard is not None and heard >= begin
        news = [lesson for author, lesson in list(self._log)[heard - begin:] if author != worker] if known else []
        self._log.extend((worker, lesson) for lesson in lessons)
        self._count += len(lessons)
        self._heard[worker] = self._count
        return (news, None) if known else ([], self.state())

    def state(self) -> dict:
        return self._pruner.to_state()
