"""The history of prompts that a rollouter (or a trainer that samples prompts itself) owns, and its file."""

from __future__ import annotations

import functools
import json
import os
import sys

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="history-saved-at-end",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.fit",
    process=("rollouter",),
    kind="wrap",
    why="between two weight versions the history is in memory only; fit() is the last that the rollouter runs, and the "
        "visits since the last sync would be lost",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "281099a51ab5cbf3"}),),
    remove_when="verl's rollouter keeps a history of its prompts",
    features=("history",),
    without=(("==0.7.0", "the recipe has another rollouter, which keeps no history"),),
)

FILE = "history.json"


def build(original):
    @functools.wraps(original)
    async def fit(self, *args, **kwargs):
        from esgrpo.hooks.verl.prompt_history import save

        try:
            return await original(self, *args, **kwargs)
        finally:
            await save(self)

    return fit


def history_of(owner):
    """The PromptHistory of this rollouter or trainer: made on first use, from the file of an earlier run if any."""
    history = getattr(owner, "esgrpo_history", None)
    if history is None:
        history = owner.esgrpo_history = load(path(), _budget(owner))
    return history


def _budget(owner) -> int:
    """Longest possible response, tokens; 0 when the owner does not say."""
    data = getattr(getattr(owner, "config", None), "data", None)
    return int(getattr(data, "max_response_length", 0) or 0)


def path() -> str | None:
    """Where the history lies; None without a run directory, then it is not kept."""
    from esgrpo import config

    given, run_dir = config.current().history.path, os.environ.get("ESGRPO_RUN_DIR")
    if given:
        return os.path.abspath(os.path.expanduser(given))
    return os.path.join(run_dir, "esgrpo", FILE) if run_dir else None


def load(file: str | None, budget: int = 0):
    """The history in `file`. One that cannot be understood is set aside and said so; the history starts empty.

    Raises EsgrpoError when the file is there and cannot be read or set aside: it would be overwritten.
    """
    from esgrpo import config
    from esgrpo.algo.history import PromptHistory
    from esgrpo.errors import EsgrpoError

    segment = config.current()
    empty = PromptHistory(segment.history, segment.routing, budget)
    if file is None or not os.path.exists(file):
        return empty
    try:
        with open(file, encoding="utf-8") as stream:
            return PromptHistory.from_state(segment.history, json.load(stream), segment.routing, budget)
    except ValueError as error:  # not JSON, not text, damaged, or of a newer esgrpo
        reason = f"{file}: {error}"
    except OSError as error:
        raise EsgrpoError("prompt-history", str(error), "a history that can be read", "it would be lost, the run stops",
                          "correct its permissions, or set segment.history.path to another file") from None
    kept = _set_aside(file)
    print(EsgrpoError("prompt-history", reason, "a history that this version wrote", "the history starts empty",
                      f"the old file is kept as {kept}: use the esgrpo that wrote it, or delete it"),
          file=sys.stderr, flush=True)
    return empty


def _set_aside(file: str) -> str:
    from esgrpo.errors import EsgrpoError

    number = 1
    while os.path.exists(f"{file}.unreadable-{number}"):
        number += 1
    kept = f"{file}.unreadable-{number}"
    try:
        os.rename(file, kept)
    except OSError as error:
        raise EsgrpoError("prompt-history", str(error), "a damaged history that can be renamed",
                          "it would be overwritten, the run stops", f"move {file} away") from None
    return kept


async def save(owner) -> None:
    """Write the history without holding up the event loop; a failed write costs the history, not the run."""
    import asyncio

    file, history = path(), getattr(owner, "esgrpo_history", None)
    if file is None or history is None:
        return
    if not hasattr(owner, "esgrpo_history_lock"):
        owner.esgrpo_history_lock = asyncio.Lock()
    async with owner.esgrpo_history_lock:
        await asyncio.to_thread(write_or_say, file, history)


def write_or_say(file: str, history) -> None:
    from esgrpo.errors import EsgrpoError

    try:
        write(file, history.to_state())
    except OSError as error:
        print(EsgrpoError("prompt-history", str(error), f"{file} written", "a restart would know less of its prompts",
                          "make room or set segment.history.path"), file=sys.stderr, flush=True)


def write(file: str, state: dict) -> None:
    """The old file or the new one, never a part. Raises OSError."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    scratch = f"{file}.new-{os.getpid()}"
    try:
        with open(scratch, "w", encoding="utf-8") as stream:
            json.dump(state, stream, separators=(",", ":"))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, file)
    except OSError:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise
