"""The READMEs' tables: a line a comparison (front.toml) and a line a module; all of them stand in docs/results.md."""

from __future__ import annotations

from pathlib import Path

from bench.common import gains
from esgrpo import compat


def table(language: str) -> list[list[str]]:
    """One row a comparison, the header first."""
    texts, found = compat.toml(Path(__file__).with_suffix(".toml")), gains.numbers()
    return [texts["head"][language], *([cell.format(**found) for cell in row[language]] for row in texts["headline"])]


def modules(language: str) -> list[list[str]]:
    """One row a module: its switch, what it decides, and in few words what that brings."""
    texts, found = gains.texts(), {**gains.numbers(), **gains.module_numbers()}
    return [texts["module_head"][language],
            *([cell.format(**found) for cell in (*row[language][:-1], row["brief"][language])]
              for row in texts["module"])]
