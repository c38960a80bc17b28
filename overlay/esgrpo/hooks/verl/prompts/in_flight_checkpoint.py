"""Saves the prompts in flight with every checkpoint of a fully-async run."""

from __future__ import annotations

import os

from esgrpo.engine import Hook
from esgrpo.errors import EsgrpoError, say

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="prompts-in-flight-are-saved",
    target=f"{_ROLLOUTER}.save_checkpoint",
    process=("rollouter",),
    kind="wrap",
    why="verl saves the position of the data loader alone; written before the trainer marks the checkpoint as the "
        "latest one, and of the same moment: nothing runs between the loader's state and this",
    remove_when="verl's rollouter saves its samples in flight with its data loader",
    features=("observe",),
    relies_on=("verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer._save_checkpoint",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)

FILE = "esgrpo_in_flight.pt"  # batches of verl's data loader, pickled as verl pickles its own data.pt beside it
FORMAT = 1


async def around(call):
    import asyncio

    from esgrpo import records
    from esgrpo.algo.rows import Checkpoint
    from esgrpo.hooks.verl.buffer import whole_samples
    from esgrpo.hooks.verl.prompts import in_flight
    from esgrpo.hooks.verl.run import resume_point

    rollouter = call.owner
    finished = await whole_samples.in_queue(rollouter)  # before the state of the loader: what comes later starts anew
    result = await call()
    folder = call.arguments["local_global_step_folder"]
    save(rollouter, folder)
    whole = whole_samples.still_open(finished, in_flight.buffer_of(rollouter).open)
    await asyncio.to_thread(whole_samples.save, whole, folder)
    records.write(Checkpoint(step=resume_point.step_of(folder), drawn=in_flight.drawn_of(rollouter)))
    await asyncio.to_thread(records.flush)  # what the checkpoint holds is in the books before it counts
    return result


def save(rollouter, folder: str) -> None:
    """A failed write costs the prompts in flight, not the checkpoint; a restart will say so, too."""
    import torch

    from esgrpo.hooks.verl.prompts.in_flight import buffer_of

    buffer, path = buffer_of(rollouter), os.path.join(folder, FILE)
    entries = [{name: value for name, value in vars(entry).items() if name != "status"}
               for entry in buffer.to_give_back()]
    ended = {str(status): number for status, number in buffer.ends.items()}
    try:
        torch.save({"format": FORMAT, "drawn": buffer.drawn, "ended": ended, "prompts": entries}, path + ".new")
        os.replace(path + ".new", path)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when a disk is full
        say(EsgrpoError("prompts in flight", f"{path}: {error}", "written with the checkpoint", f"{len(entries)} "
                        "prompts would not be trained after a restart from it", "make room"))


def load(folder: str):
    """The ExperienceBuffer as saved; None where the checkpoint has none. Raises ValueError for another kind of file."""
    import torch

    from esgrpo.algo.experience import Drawn, ExperienceBuffer

    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        return None
    try:
        state = torch.load(path, weights_only=False)
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, not {FORMAT}")
        return ExperienceBuffer(int(state["drawn"]), [Drawn(**entry) for entry in state["prompts"]], state.get("ended"))
    except Exception as error:  # pickle raises anything for a damaged file
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
