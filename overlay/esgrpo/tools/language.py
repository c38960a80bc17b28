"""The language that a command answers in: English, or Chinese under --lang zh or a Chinese locale.

A data file (TOML) has both texts side by side: `cause` and `cause_zh` of one table. A file of texts alone has one table
a text, [name] with en and zh; what stands in braces is filled in, by str.format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from esgrpo import compat

LANGUAGES = ("en", "zh")
_spoken: ContextVar[str] = ContextVar("language", default="en")


def asked(option: str | None, environment: Mapping[str, str]) -> str:
    """--lang, else what the locale says; of its variables the first that is set counts (POSIX)."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return option or ("zh" if locale.lower().startswith("zh") else "en")


def spoken() -> str:
    return _spoken.get()


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Everything said inside is said in this language."""
    token = _spoken.set(language)
    try:
        yield
    finally:
        _spoken.reset(token)


def of(table: Mapping[str, str], key: str) -> str:
    """table[key], or table[key_zh] where Chinese is spoken. Raises KeyError where the table lacks it."""
    return table[key if spoken() == "en" else f"{key}_{spoken()}"]


def texts(file: Path, name: str, /, **values) -> str:
    """The text `name` of a file of texts, filled in. Raises KeyError where the file or `values` lack one."""
    return _tables(file)[name][spoken()].format(**values)


def counted(number: int, noun: str) -> str:
    """In English: 1 error, 2 errors."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_tables = cache(compat.toml)
