"""The history of prompts that a rollouter (or a trainer that samples prompts itself) owns, and its file."""

from __future__ import annotations

import os

from esgrpo.engine import Hook

HOOK = Hook(
    slug="history-saved-at-end",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.fit",
    process=("rollouter",),
    kind="wrap",
    why="between two weight versions the history is in memory only; fit() is the last that the rollouter runs, and the "
        "visits since the last sync would be lost",
    after=("rollouter-failure-is-loud",),
    remove_when="verl's rollouter keeps a history of its prompts",
    features=("history",),
    without=(("==0.7.0", "the recipe has another rollouter, which keeps no history"),),
)

FILE = "history.json"


async def around(call):
    import asyncio

    from esgrpo import records

    rollouter = call.owner
    try:
        return await call()
    finally:
        save(rollouter)
        await asyncio.to_thread(records.flush)  # the actor is killed soon after


def history_of(owner):
    """The PromptHistory of this rollouter or trainer: made on first use, from the file of an earlier run if any."""
    from esgrpo.hooks.verl import owned

    prompts = owned.of(owner, owned.Prompts)
    if prompts.history is None:
        prompts.history = load(path(), _budget(owner))
    return prompts.history


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
    """The history in `file`; empty when there is none, or none that can be understood (see `state_files.restored`)."""
    from esgrpo import config
    from esgrpo.algo.history import PromptHistory
    from esgrpo.hooks.verl import state_files

    segment = config.current()

    def parse(state):
        return PromptHistory.from_state(segment.history, state, segment.routing, budget)

    history = state_files.restored("prompt-history", file, parse)
    return PromptHistory(segment.history, segment.routing, budget) if history is None else history


def save(owner) -> None:
    """Have the history written; a failed write costs the history, not the run."""
    from esgrpo import records
    from esgrpo.hooks.verl import owned

    file, history = path(), owned.of(owner, owned.Prompts).history
    if file is not None and history is not None:
        records.save(file, history.to_state)
