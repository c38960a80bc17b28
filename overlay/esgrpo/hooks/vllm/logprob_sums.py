"""Sums of sampled log-probs per request, and of how many tokens they are: vectorised operations, once a step."""

from __future__ import annotations

import numpy as np

NOTHING = (0.0, 0)  # sum of no tokens


def _columns(logprobs):
    """(log-probs of the sampled tokens, first row of each request or None) of a LogprobsLists.

    vLLM < 0.12 has lists of floats, and one row per request without starts.
    """
    return np.asarray(logprobs.logprobs)[:, 0], getattr(logprobs, "cu_num_generated_tokens", None)


class LogprobSums:
    """Accumulates in the order of the model runner's batch; re-ordered only when the batch changes."""

    def __init__(self):
        self._order: list[str] = []
        self._sums = np.zeros(0)
        self._rows = np.zeros(0, dtype=np.int64)  # tokens in each sum, without those that _each counts
        self._each = 0  # steps since the batch changed that gave every request one token
        self._places: dict[str, int] = {}  # id -> place in _order: the runner's own map, made anew every step
        self._parked: dict[str, tuple[float, int]] = {}  # preempted: in no batch now, may come back
        self._late: dict[str, int] = {}  # scheduled tokens whose rows are still to come, and will be dropped
        self.several: dict[str, int] = {}  # ids with more than one token in the last step -> how many
        self._last_step: tuple | None = None  # of that step: sums before it, rows, first row and number of rows of each

    def add(self, output, scheduled, alive, one_each: bool = False) -> int:
        """Add one ModelRunnerOutput; returns the number of tokens in it that reach a response.

        `scheduled` maps ids to the tokens that were scheduled in this step, `alive` holds the ids of requests that
        still exist: a request that has ended may have one more row in flight, which must not stay behind. `one_each`:
        no request was scheduled for more than one token, so that none has sampled more.
        """
        sampled = output.sampled_token_ids
        self.several, self._last_step = {}, None
        if not sampled:
            return 0
        total = len(sampled) if one_each and all(sampled) else sum(map(len, sampled))
        late = self._too_late(output, scheduled) if self._late else []
        reached = total - sum(len(sampled[index]) for index in late)
        logprobs = output.logprobs
        if logprobs is None:
            self._note_several(output, late)
            return reached
        if output.req_ids != self._order:
            self._reorder(list(output.req_ids), alive)
        self._places = output.req_id_to_index
        rows, starts = _columns(logprobs)
        if starts is None and total == len(sampled) == len(rows):  # without starts nobody has more than one
            self._sums += rows
            self._each += 1
            if late:  # of a request that lives on
                self._sums[late] -= rows[late]
                self._rows[late] -= 1
        else:  # speculative decoding, or prefill chunks that sampled nothing
            self._note_several(output, late)
            counts = np.fromiter(map(len, sampled), dtype=np.int64, count=len(sampled))
            counts[late] = 0
            if starts is None:  # what was sampled beyond the first token has no row
                starts, counts = np.arange(len(counts)), np.minimum(counts, 1)
            else:
                starts = np.asarray(starts[:len(counts)])
            owner = np.repeat(np.arange(len(counts)), counts)  # only sampled rows: others may hold -inf or nan
            row = np.arange(counts.sum()) + (starts - np.cumsum(counts) + counts)[owner]
            self._last_step = self._sums, rows, starts, counts
            self._sums = self._sums + np.bincount(owner, weights=rows[row], minlength=len(counts))
            self._rows += counts
        return reached

    def _note_several(self, output, late: list[int]) -> None:
        sampled = output.sampled_token_ids
        if max(map(len, sampled)) > 1:
            dropped = set(late)
            self.several = {key: len(tokens) for place, (key, tokens) in
                            enumerate(zip(output.req_ids, sampled, strict=True))
                            if len(tokens) > 1 and place not in dropped}

    def trim(self, key: str, kept: int) -> int:
        """Take back what follows the end of a response: of the last step's tokens of `key`, `kept` were delivered.

        An accepted draft may go on after the end. Returns how many tokens were trimmed; before `pop`.
        """
        made = self.several.pop(key, 0)
        if made <= kept:
            return 0
        if self._last_step is not None:
            before, rows, starts, counts = self._last_step
            place = self._order.index(key)
            first, count = int(starts[place]), min(kept, int(counts[place]))
            self._sums[place] = before[place] + rows[first:first + count].sum(dtype=np.float64)
            self._rows[place] += count - int(counts[place])
        return made - kept

    def ended(self, key: str, in_flight: int) -> None:
        """Upstream drops what the worker still samples for a request, most often an ended one.

        `in_flight` is in scheduled tokens.
        """
        if in_flight > 0:
            self._late[key] = in_flight

    def _too_late(self, output, scheduled) -> list[int]:
        """Places in this output's batch of what upstream drops."""
        late = [key for key in self._late if key in scheduled]
        for key in late:
            self._late[key] -= scheduled[key]
            if self._late[key] <= 0:
                del self._late[key]
        return [output.req_id_to_index[key] for key in late]

    def _reorder(self, order: list[str], alive) -> None:
        entries = zip(self._sums.tolist(), (self._rows + self._each).tolist(), strict=True)
        known = {**self._parked, **dict(zip(self._order, entries, strict=True))}
        entries = [known.pop(key, NOTHING) for key in order]
        self._sums = np.fromiter((entry[0] for entry in entries), dtype=np.float64, count=len(order))
        self._rows = np.fromiter((entry[1] for entry in entries), dtype=np.int64, count=len(order))
        self._order, self._each = order, 0
        self._parked = {key: value for key, value in known.items() if key in alive}

    def of(self, key: str) -> tuple[float, int]:
        """Sum of a request so far, and how many tokens it is the sum of: fewer than were made where rows are missing.

        Of a request that has not ended: upstream may trim what was sampled beyond an end.
        """
        if self._parked and key in self._parked:
            return self._parked[key]
        place = self._places.get(key)
        return NOTHING if place is None else (self._sums.item(place), self._rows.item(place) + self._each)

    def pop(self, key: str) -> float:
        """The sum of an ended request; it is forgotten at the next change of the batch."""
        if key in self._parked:
            return self._parked.pop(key)[0]
        place = self._places.get(key)
        if place is None:
            return 0.0
        value = float(self._sums[place])
        self._sums[place], self._rows[place] = 0.0, -self._each
        return value
