"""Follows a launch script without running it: variables, arrays, arithmetic, conditions, and the launches of verl.

What cannot be known (the environment, output of commands) stays unknown and is carried along as such; where a
condition is unknown, all branches are followed and the first one sets the variables. No process is started and no
file but sourced ones is read.
"""

from __future__ import annotations

import fnmatch
import itertools
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path

from esgrpo.tools.lint.expansion import Variables, home, is_unknown, unknown
from esgrpo.tools.lint.words import Command, Comment, Lexer, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w@:/-]*(\.[\w@:/-]+)+=|[+~]{1,2}[A-Za-z_][\w@:/.-]*=|"
                      r"--config-(path|name)\b")
COMMENTED = re.compile(r"#+\s*([+~]{0,2}[A-Za-z_]\w*(\.[\w@/]+)+=.*)")
DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|ray)$|\0")
MAX_SOURCED = 8  # files that source each other
_COMPARISONS = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
                "-le": operator.le}


@dataclass
class Argument:
    text: str
    line: int


@dataclass
class Launch:
    """One `python -m MODULE ARGUMENTS`. `dropped` stands in the script after a cut and never reaches Python."""

    module: str
    line: int
    end: int
    arguments: list[Argument]
    dropped: list[Argument] = field(default_factory=list)
    commented: list[Argument] = field(default_factory=list)
    cuts: list[tuple[int, str]] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    with_overlay: bool = False  # started by `esgrpo run`


def _starts_overlay(before: list[str], environment: dict[str, str]) -> bool:
    """`esgrpo run -- python ...`, `python -m esgrpo run -- python ...`, or the variable that these set."""
    runs = any(word.rpartition("/")[2] == "esgrpo" and after == "run" for word, after in itertools.pairwise(before))
    return runs or environment.get("ESGRPO_ENABLE") == "1"


@dataclass
class _Frame:
    """An open if, case or loop. `active`: True, False or None (unknown)."""

    kind: str
    active: bool | None = True
    taken: bool | None = False
    subject: str = ""
    patterns: list[str] = field(default_factory=list)
    waiting: bool = False
    frozen: bool = False  # another branch of an unknown choice has set the variables


class Script(Variables):
    """Reads `path`; `launches` is the result. `variables` are set as if exported before the script starts."""

    def __init__(self, path: Path, variables: dict[str, str] | None = None):
        super().__init__(variables or {})
        self.given = set(self.variables)
        self.exported: dict[str, str] = dict(variables or {})
        self.launches: list[Launch] = []
        self.crlf = 0  # lines that end in CRLF
        self._frames: list[_Frame] = []
        self._read(path.resolve())

    def _read(self, path: Path) -> None:
        if len(self._files) >= MAX_SOURCED:
            return
        self._files.append(path)
        text = path.read_bytes().decode("utf-8", errors="replace")
        self.crlf += text.count("\r\n")
        lexer = Lexer(text.replace("\r\n", "\n")).scan()
        self._follow(lexer.commands, lexer.comments)
        self._files.pop()

    # ---- control flow

    def _state(self) -> bool | None:
        states = [frame.active for frame in self._frames]
        return False if False in states else None if None in states else True

    def _follow(self, commands: list[Command], comments: list[Comment]) -> None:
        index, result, before = 0, True, "\n"
        condition: list[tuple[str, bool | None]] | None = None
        while index < len(commands):
            command = commands[index]
            first = command.words[0].plain if command.words else ""
            if self._control(command, first, condition):
                condition = [] if first in ("if", "elif") else None
                before, index = "\n", index + 1
                continue
            skip = (before == "&&" and result is False) or (before == "||" and result is True)
            doubt = before in ("&&", "||") and result is None
            if condition is not None:
                value = self._test(command)
                condition.append((before, value))
                result = value
            elif skip or self._state() is False:
                pass
            else:
                self._frames.append(_Frame("list", None if doubt else True))
                if launch := self._launch(command):
                    index = self._gather(launch, commands, index, comments)
                    command = commands[index]
                elif first in ("[", "[[", "test"):
                    result = self._test(command)
                else:
                    self._simple(command)
                    result = True if command.words and ASSIGNMENT.match(first) else None
                self._frames.pop()
            before = command.operator
            index += 1

    def _control(self, command: Command, first: str, condition) -> bool:
        """Opens, switches and closes frames; True when the command is nothing else."""
        top = self._frames[-1] if self._frames else None
        if top and top.kind == "case" and (top.waiting or command.operator == ")" and first != "case"):
            return self._pattern(top, command, first)
        if top and top.kind == "case" and command.operator == ";;":
            top.waiting = True  # after this command
            return not command.words
        if first == "if":
            self._frames.append(_Frame("if", None))
        elif first in ("elif", "else") and top and top.kind == "if":
            top.active = False if top.taken is True else None if top.taken is None else True
            top.frozen = top.taken is None
        elif first == "then" and top and top.kind == "if":
            value = self._combined(condition or [])
            if top.taken is True:
                value = False
            elif top.taken is None and value is True:
                value = None
            top.active = value
            top.taken = True if value is True else top.taken if value is False else None
        elif first in ("fi", "done", "esac") and top:
            self._frames.pop()
        elif first in ("for", "select"):
            self._frames.append(_Frame("loop"))
            if len(command.words) > 1 and command.words[1].plain.isidentifier():
                items = [text for word in command.words[3:] for text in self.expand(word)]
                name = command.words[1].plain
                self.variables[name] = items[0] if len(items) == 1 else unknown(f"loop over {name}")
        elif first in ("while", "until"):
            self._frames.append(_Frame("loop", None))
        elif first == "case":
            subject = "".join(self.expand(command.words[1])) if len(command.words) > 1 else ""
            self._frames.append(_Frame("case", False, subject=subject, waiting=True))
            if len(command.words) > 3:
                rest = Command(command.words[3:], command.line, command.end, command.operator)
                self._pattern(self._frames[-1], rest, rest.words[0].plain)
        else:
            return first in ("do", "{", "}", "!", "time")
        return True

    def _pattern(self, frame: _Frame, command: Command, first: str) -> bool:
        if first == "esac":
            self._frames.pop()
            return True
        frame.patterns += ["".join(self.expand(word)) for word in command.words]
        if command.operator == ")":
            if is_unknown(frame.subject):
                frame.frozen, frame.active = frame.active is None, None
            else:
                matched = any(fnmatch.fnmatch(frame.subject, pattern) for pattern in frame.patterns)
                frame.active = matched and frame.taken is False
                frame.taken = frame.taken or matched
            frame.patterns, frame.waiting = [], False
        return True

    @staticmethod
    def _combined(tests: list[tuple[str, bool | None]]) -> bool | None:
        result: bool | None = True
        for number, (joined, value) in enumerate(tests):
            if number == 0 or joined not in ("&&", "||"):
                result = value
            elif joined == "&&":
                result = False if False in (result, value) else None if None in (result, value) else True
            else:
                result = True if True in (result, value) else None if None in (result, value) else False
        return result

    def _test(self, command: Command) -> bool | None:
        """Value of [ ... ], [[ ... ]] or test; None when it is not known."""
        words = ["".join(self.expand(word)) for word in command.words]
        if not words or words[0] not in ("[", "[[", "test"):
            return None
        tests: list[tuple[str, bool | None]] = []
        joined, part = "", []
        for word in [*(w for w in words[1:] if w not in ("]", "]]")), "&&"]:
            if word in ("&&", "||"):
                tests.append((joined, self._negatable(part)))
                joined, part = word, []
            else:
                part.append(word)
        return self._combined(tests)

    def _negatable(self, words: list[str]) -> bool | None:
        negated = words[:1] == ["!"]
        value = self._condition(words[1:] if negated else words)
        return value if value is None or not negated else not value

    @staticmethod
    def _condition(words: list[str]) -> bool | None:
        if len(words) == 2 and words[0] in ("-z", "-n") and not is_unknown(words[1]):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) == 1:
            return None if is_unknown(words[0]) else bool(words[0])
        if len(words) != 3 or is_unknown(words[0] + words[2]):
            return None
        left, comparison, right = words
        if comparison in ("=", "=="):
            return fnmatch.fnmatchcase(left, right)
        if comparison == "!=":
            return not fnmatch.fnmatchcase(left, right)
        if comparison in _COMPARISONS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return _COMPARISONS[comparison](int(left), int(right))
        return None

    # ---- simple commands

    def _simple(self, command: Command) -> None:
        words = list(command.words)
        first = words[0].plain if words else ""
        if first in ("source", ".") and len(words) > 1:
            self._source("".join(self.expand(words[1])))
            return
        exporting = first == "export"
        if first in DECLARATIONS:
            words = [word for word in words[1:] if not word.plain.startswith("-")]
        elif first == "set":
            return
        for word in words:
            found = ASSIGNMENT.match(word.plain) if word.pieces and word.pieces[0][0] == "text" else None
            if not found:
                if not (exporting and word.plain in self.variables):
                    return
                name = word.plain
            else:
                name = found.group(1)
                self._assign(word, name, bool(found.group(2)), found.end())
            if exporting or name in self.given:
                value = self.variables.get(name, "")
                self.exported[name] = value if isinstance(value, str) else " ".join(value)

    def _assign(self, word: Word, name: str, append: bool, skip: int) -> None:
        if word.array is not None:
            value: str | list[str] = [text for element in word.array for text in self.expand(element)]
        else:
            kind, text, quoted = word.pieces[0]
            rest = Word(word.line, [(kind, home(text[skip:]), quoted), *word.pieces[1:]])
            value = "".join(self.expand(rest, split=False))
        if any(frame.frozen for frame in self._frames):
            return
        old = self.variables.get(name)
        if append:
            if isinstance(value, list):
                value = ([old] if isinstance(old, str) and old else list(old or [])) + value
            else:
                value = (old if isinstance(old, str) else "") + value
        elif self._state() is None and isinstance(value, str) and old not in (None, "", value):
            value = unknown(f"{name} depends on a condition")
        self.variables[name] = value

    def _source(self, path: str) -> None:
        if not is_unknown(path):
            place = Path(path) if Path(path).is_absolute() else self._files[-1].parent / path
            if place.is_file():
                self._read(place)

    # ---- launches

    def _launch(self, command: Command) -> Launch | None:
        arguments = [Argument(text, word.line) for word in command.words for text in self.expand(word)]
        texts = [argument.text for argument in arguments]
        start = next((i for i, text in enumerate(texts) if PYTHON.match(text)), None)
        if start is None:
            return None
        for index in range(start, len(texts) - 1):
            module, rest = texts[index + 1], index + 2
            if texts[index].endswith(".py") and "/" in texts[index]:
                module, rest = texts[index][:-3].lstrip("./").replace("/", "."), index + 1
            elif texts[index] != "-m":
                continue
            if not re.fullmatch(r"[\w.]+", module) or not any("main" in part for part in module.split(".")[-1:]):
                continue
            environment = dict(self.exported)
            for text in texts[:start]:
                if found := ASSIGNMENT.match(text):
                    environment[found.group(1)] = text[found.end():]
            return Launch(module, command.line, command.end, arguments[rest:], exported=environment,
                          with_overlay=_starts_overlay(texts[:index], environment))
        return None

    def _gather(self, launch: Launch, commands: list[Command], index: int, comments: list[Comment]) -> int:
        """What follows the launch although it reads like its arguments. Returns the index of the last command used."""
        last = commands[index]
        if last.cut:
            launch.cuts.append((last.cut_line, last.cut))
        while index + 1 < len(commands) and last.operator in ("\n", "reserved"):
            following = commands[index + 1]
            raw = following.words[0].plain if following.words else ""
            if not OVERRIDE.match(raw):
                break
            if not last.cut:
                launch.cuts.append((last.end, "no_backslash"))
            elif index + 1 and last is not commands[index] and last.cut:
                launch.cuts.append((last.cut_line, last.cut))
            launch.dropped += [Argument(text, word.line) for word in following.words for text in self.expand(word)]
            index, last = index + 1, following
        if not launch.dropped:
            launch.cuts = [cut for cut in launch.cuts if cut[1] == "blank_after_backslash" and not self._is_last(last)]
        launch.end = last.end
        for comment in comments:
            found = COMMENTED.match(comment.text)
            if found and launch.line <= comment.line <= launch.end:
                text = found.group(1).rstrip()
                text = text.rstrip("\\").rstrip() if text.endswith("\\") else text
                words = Lexer(text, comment.line).scan().commands
                if words:
                    launch.commented += [Argument(field, comment.line) for field in self.expand(words[0].words[0])]
        self.launches.append(launch)
        return index

    @staticmethod
    def _is_last(command: Command) -> bool:
        return command.operator in ("\n", "eof")
