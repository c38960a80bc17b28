"""`esgrpo status RUN_DIR --books`: do the records of a run add up? Needs neither torch nor verl."""

from __future__ import annotations

import json
import os

from esgrpo import records
from esgrpo.algo import books
from esgrpo.errors import EsgrpoError, show
from esgrpo.tools import run_dirs


def of_directory(run_dir: str) -> tuple[list[books.Books], int]:
    """The books of every run in a directory, oldest first, and the number of torn rows. Raises EsgrpoError."""
    rows, torn = {}, 0
    for kind in books.KINDS:
        rows[kind], cut = records.read_counted(run_dir, kind)
        torn += cut
    runs = books.of_runs(rows)
    if not runs:
        raise EsgrpoError("status --books", f"no rows in {os.path.join(run_dir, records.FOLDER)}",
                          "records of a run with the overlay", "nothing to settle",
                          run_dirs.ADVICE)
    return [books.settle(mine, run) for run, mine in runs.items()], torn


def as_dict(found: books.Books) -> dict:
    return {"run": found.run, "balanced": found.balanced, "problems": found.problems, "starts": found.starts,
            "prompts": dict(found.prompts), "epochs": found.epochs, "responses": dict(found.responses),
            "dropped_rows": found.dropped}


def lines(found: books.Books) -> list[str]:
    """What a person reads of one run."""
    def counts(counter) -> str:
        return ", ".join(f"{number} {fate.replace('_', ' ')}" for fate, number in counter.items() if number)

    epochs = [f"  epoch {one['epoch']}: {one['prompts']} prompts: "
              + counts({fate: one[fate] for fate in one if fate not in ("epoch", "prompts")}) for one in found.epochs]
    starts = [f"  start {one['restart']}: {one['in_flight']} prompts were in flight, {one['came_back']} came back, "
              f"{one['missing']} missing; {one['drawn_again']} are drawn again"
              for one in found.starts[1:]]
    prompts = counts(found.prompts) or "not recorded (by an older release of the overlay)"
    return [f"run {found.run or 'without id'}: {len(found.starts)} start(s)", *starts, f"  prompts: {prompts}", *epochs,
            f"  responses: {counts(found.responses) or 'none'}", f"  rows that could not be written: {found.dropped}",
            "  the books balance" if found.balanced else "  DO NOT BALANCE: " + "; ".join(found.problems)]


def main(directory: str, as_json: bool) -> int:
    """Print, of a run or of each run in the directory of a comparison; 0 when all were read and balance, else 1."""
    run_dirs.check("status --books", directory, "nothing to settle")
    found, lost = run_dirs.read_each("status --books", directory, of_directory)
    several = len(found) + len(lost) > 1
    if as_json:
        told = {os.path.basename(path): {"runs": [as_dict(one) for one in runs], "torn_rows": torn}
                for path, (runs, torn) in found.items()}
        told |= {os.path.basename(path): {"error": line} for path, line in lost.items()}
        print(json.dumps(told if several else next(iter(told.values())), indent=2))
    else:
        for path, (runs, torn) in found.items():
            if several:
                show(path)
            for one in runs:
                show("\n".join(lines(one)))
            show(f"rows cut short where a process was killed: {torn}")
    return 1 if lost or not all(one.balanced for runs, _ in found.values() for one in runs) else 0
