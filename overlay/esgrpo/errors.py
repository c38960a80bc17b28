"""One error type, one line, five parts."""

from __future__ import annotations

import os
import re
import sys

# of terminals (ECMA-48): control sequences, strings such as a window's title, and two-character ones
_ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*"
                     r"(?:\x07|\x9c|\x1b\\|$)|\x1b[ -/]*[0-~]")


def plain(text: str) -> str:
    """One line without terminal escapes and other characters that do not print: foreign text is only shown."""
    return "".join(c if c.isprintable() else " " for c in _ESCAPE.sub("", text))


def say(line: object) -> None:
    """The one way of a line of ours to standard error: an error, or words that may quote foreign text."""
    print(plain(str(line)), file=sys.stderr, flush=True)


def show(text: object = "") -> None:
    """The one way of text of ours to standard output, any number of lines."""
    print("\n".join(map(plain, str(text).split("\n"))), flush=True)


def leave_stdout() -> None:
    """After an error of writing to it: the interpreter flushes once more when it exits, and would tell of it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class EsgrpoError(RuntimeError):
    """who, found, wanted, consequence, what to do; picklable, because it crosses Ray."""

    def __init__(self, who: str, found: str, wanted: str, consequence: str, todo: str):
        super().__init__(who, found, wanted, consequence, todo)

    def __str__(self) -> str:
        who, found, wanted, consequence, todo = self.args
        return plain(f"esgrpo: {who}: {found} | wanted {wanted} | {consequence} | {todo}")


class ConfigError(EsgrpoError, ValueError):
    """A value under `segment` that cannot work."""


class HookError(EsgrpoError):
    """A hook that the run needs is not in place."""


class RunError(EsgrpoError):
    """A run that had begun ends: the driver adds how to resume it."""


class Terminated(EsgrpoError):
    """A SIGTERM ended the run; the line says what was saved."""
