"""What a benchmark says on its console, and what it takes from a command line: a user's mistake is one line, told
before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from esgrpo import errors
from esgrpo.arguments import Parser
from esgrpo.errors import EsgrpoError


def say(text: str) -> None:
    print(f"esgrpo: {text}", flush=True)


def print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for index, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if index == 0:
            print("  ".join("-" * width for width in widths))


def listed(values: Iterable) -> str:
    """As it stands on a command line."""
    return ",".join(map(str, values))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def exit_code(main: Callable, argv: list[str] | None = None) -> int | str:
    """What `main` returns, for sys.exit. Files that are missing, damaged or full are the user's to cure and one line;
    any other exception is a bug of ours and stays what it is."""
    who = getattr(sys.modules[main.__module__].__spec__, "name", main.__module__).removesuffix(".__main__")
    try:
        found = main(argv)
        sys.stdout.flush()  # here, where a full disk or a closed pipe is caught
        return found if isinstance(found, (int, str)) else 0
    except EsgrpoError as error:
        errors.say(error)
    except json.JSONDecodeError as error:
        errors.say(EsgrpoError(who, f"{error} of {error.doc[:40]!r}", "JSON", "stopped there", "give another file"))
    except BrokenPipeError:  # `python -m bench.gains | head`
        errors.leave_stdout()
        return 0
    except OSError as error:
        found = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        errors.say(EsgrpoError(who, found, "files that can be read and written", "stopped there",
                               "correct the path, its rights, or the room on its disk"))
        errors.leave_stdout()
    except KeyboardInterrupt:
        errors.say(EsgrpoError(who, "interrupted", "a whole run", "stopped there", "run it again"))
        return 130
    return 2


@contextlib.contextmanager
def reading(option: str, path: Path | str, wanted: str) -> Iterator[None]:
    """Around the reading of a user's file alone: whatever that raises is the file's fault. Raises EsgrpoError."""
    try:
        yield
    except EsgrpoError:
        raise
    except (ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError) as error:
        raise EsgrpoError(option, f"{path}: {type(error).__name__}: {error}", wanted, "nothing was started",
                          "give another file") from error


@contextlib.contextmanager
def measured(who: str) -> Iterator[None]:
    """Around real runs: one that failed has told why in its log."""
    try:
        yield
    except EsgrpoError:
        raise
    except RuntimeError as error:
        raise EsgrpoError(who, str(error), "a run that ends and is recorded", "nothing was measured",
                          "see its log") from error


def command_line(name: str, description: str) -> Parser:
    return Parser(prog=f"python -m {name}", description=description,
                  formatter_class=argparse.RawDescriptionHelpFormatter,
                  allow_abbrev=False)  # --togeth would stay in what the runs of --together are started with


# Types of argparse

def _refused(found: object, wanted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{found}: wanted {wanted}")


def _number(kind: type, fits: Callable[[float], bool], wanted: str) -> Callable:
    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise _refused(text, wanted) from None
        if not (fits(value) and value < math.inf):
            raise _refused(text, wanted)
        return value

    return read


count = _number(int, lambda value: value > 0, "a whole number above 0")
whole = _number(int, lambda value: value >= 0, "a whole number from 0 on")
positive = _number(float, lambda value: value > 0, "a number above 0")
not_negative = _number(float, lambda value: value >= 0, "a number from 0 on")
share = _number(float, lambda value: 0 < value <= 1, "a share above 0, at most 1")


def _several(kind: Callable, wanted: str) -> Callable:
    def read(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except (ValueError, argparse.ArgumentTypeError):
            raise _refused(text, wanted) from None

    return read


seeds = _several(whole, "whole numbers, as 1,2,3")
counts = _several(count, "whole numbers above 0, as 64,256")


def names(known) -> Callable:
    """Of a list with commas."""
    def read(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise _refused(f"unknown {unknown[0]!r}", f"one or more of {', '.join(known)}")
        return given

    return read


def existing_file(text: str) -> Path:
    if not os.path.isfile(text):
        raise _refused(text, "a file" if os.path.exists(text) else "a file that exists")
    return Path(text)


def existing_folder(text: str) -> Path:
    if not os.path.isdir(text):
        raise _refused(text, "a directory" if os.path.exists(text) else "a directory that exists")
    return Path(text)


def model_folder(text: str) -> Path:
    if not os.path.isfile(os.path.join(text, "config.json")):
        raise _refused(text, "a model's directory, with a config.json")
    return Path(text)


def output_file(text: str) -> Path:
    """Told before the work is done, which would be lost."""
    if os.path.isdir(text or "."):
        raise _refused(text, "a file to write, not a directory")
    return Path(text) if os.path.exists(text) and os.access(text, os.W_OK) else _below_a_folder(text)


def output_folder(text: str) -> Path:
    return _below_a_folder(text)


def _below_a_folder(text: str) -> Path:
    path = Path(text)
    nearest = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise _refused(text, f"a place that can be written, and {nearest} is no directory that can be")
    return path


def device(text: str) -> str:
    import torch

    name, _, number = text.partition(":")
    if name != "cpu" and not (name == "cuda" and int(number or 0) < torch.cuda.device_count()):
        raise _refused(text, f"cpu or a CUDA device; torch sees {torch.cuda.device_count()}")
    return text
