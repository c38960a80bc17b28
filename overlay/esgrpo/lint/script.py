"""Follows a launch script without running it: variables, arrays, arithmetic, conditions, and the launches of verl.

What cannot be known (the environment, output of commands) stays unknown and is carried along as such; where a
condition is unknown, all branches are followed and the first one sets the variables. No process is started and no
file but sourced ones is read.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path

from esgrpo.lint.words import Command, Comment, Lexer, Word

UNKNOWN = re.compile("\0([^\0]*)\0")  # a part of a value that only the run will know, with its origin
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w@:/-]*(\.[\w@:/-]+)+=|[+~]{1,2}[A-Za-z_][\w@:/.-]*=|"
                      r"--config-(path|name)\b")
COMMENTED = re.compile(r"#+\s*([+~]{0,2}[A-Za-z_]\w*(\.[\w@/]+)+=.*)")
DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|ray)$|\0")
MAX_SOURCED = 8  # files that source each other
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
               ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_COMPARISONS = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
                "-le": operator.le}


def unknown(origin: str) -> str:
    return "\0" + re.sub(r"\s+", "_", origin) + "\0"


def is_unknown(text: str) -> bool:
    return "\0" in text


def _home(text: str) -> str:
    """Tilde expansion, which bash does behind = and :- but not inside other words."""
    return unknown("HOME") + text[1:] if re.match(r"~(/|$)", text) else text


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
    followed_by: str = ""


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


class Script:
    """Reads `path`; `launches` is the result. `variables` are set as if exported before the script starts."""

    def __init__(self, path: Path, variables: dict[str, str] | None = None):
        self.path = path
        self.variables: dict[str, str | list[str]] = dict(variables or {})
        self.given = set(self.variables)
        self.exported: dict[str, str] = dict(variables or {})
        self.launches: list[Launch] = []
        self._frames: list[_Frame] = []
        self._files: list[Path] = []
        self._read(path.resolve())

    def _read(self, path: Path) -> None:
        if len(self._files) >= MAX_SOURCED:
            return
        self._files.append(path)
        lexer = Lexer(path.read_text(encoding="utf-8", errors="replace")).scan()
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
        words = [w for w in words[1:] if w not in ("]", "]]")]
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
            home = _home(text[skip:])
            rest = Word(word.line, [(kind, home, quoted), *word.pieces[1:]])
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

    # ---- expansion

    def expand(self, word: Word, split: bool = True) -> list[str]:
        """The fields that this word becomes; unquoted expansions are split at blanks unless `split` is False."""
        fields, present, lists = [""], word.array is not None, False
        for kind, text, quoted in word.pieces:
            if kind == "text":
                fields[-1] += text
                present = present or quoted or bool(text)
                continue
            value = self._value(kind, text)
            if isinstance(value, list):
                parts = value if quoted and not text.endswith("[*]") else " ".join(value).split()
                lists = lists or quoted
            else:
                parts = value.split() if split and not quoted else [value]
                present = present or quoted
            if not parts:
                continue
            if not quoted and isinstance(value, str) and value[:1].isspace() and fields[-1]:
                fields.append("")
            fields[-1] += parts[0]
            fields += parts[1:]
        # "$@" and "${X[@]}" without elements are no word at all
        return [] if fields == [""] and (lists or not present) else fields

    def _value(self, kind: str, text: str) -> str | list[str]:
        if kind == "arithmetic":
            return self._arithmetic(text)
        if kind == "command":
            if "dirname" in text and ("$0" in text or "BASH_SOURCE" in text) and ".." not in text:
                return str(self._files[-1].parent)
            return unknown(f"$({text})")
        return self._variable(text)

    def _variable(self, text: str) -> str | list[str]:
        found = re.fullmatch(r"(#?)([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^]]*\])?(:?[-=+?])?(.*)", text, re.DOTALL)
        if not found or found.group(1):
            return unknown(f"${{{text}}}")
        _, name, subscript, how, rest = found.groups()
        value = self.variables.get(name)
        if name in ("BASH_SOURCE", "0") and self._files:
            return str(self._files[-1])
        if name in "@*" or name.isdigit():
            value = None
        if how:
            empty = value is None or (how.startswith(":") and value in ("", []))
            if how[-1] in "-=":
                if empty and how[-1] == "=":
                    self.variables[name] = self._text(rest)
                return self._text(rest) if empty else self._plain(value, subscript)
            if how[-1] == "+":
                return self._plain_default(rest) if not empty else ""
            return self._plain(value, subscript) if not empty else unknown(name)
        if rest:
            return [] if name in "@*" else unknown(f"${{{text}}}")
        if value is None:
            return [] if name in "@*" else unknown(name)
        return self._plain(value, subscript)

    @staticmethod
    def _plain(value: str | list[str], subscript: str | None) -> str | list[str]:
        if isinstance(value, str):
            return value
        if subscript in ("[@]", "[*]"):
            return value
        number = subscript[1:-1] if subscript else "0"
        return value[int(number)] if number.isdigit() and int(number) < len(value) else unknown("array element")

    def _plain_default(self, text: str) -> str | list[str]:
        """${X[@]+"${X[@]}"} and its kin: the alternative may be an array again."""
        inner = text.strip('"')
        found = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[@\]\}", inner)
        value = self.variables.get(found.group(1)) if found else None
        return value if isinstance(value, list) else self._text(text)

    def _text(self, text: str) -> str:
        """Expansion of the text after :- and of the like, where quotes are removed and blanks stay."""
        lexer = Lexer(_home(text))
        word = lexer._word(stops="")
        return "".join("".join(v) if isinstance(v, list) else v
                       for v in (t if k == "text" else self._value(k, t) for k, t, _ in word.pieces))

    def _arithmetic(self, text: str) -> str:
        """Value of $((text)); unknown when it is not made of + - * / %, parentheses and known integers."""
        text = self._text(text)
        if is_unknown(text):
            return unknown(UNKNOWN.search(text).group(1))

        def value(node) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.Name):
                known = self._variable(node.id)
                if not isinstance(known, str) or is_unknown(known):
                    raise LookupError(node.id)
                return value(ast.parse(known.strip() or "0", mode="eval").body)
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -value(node.operand)
            if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
                return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
            raise LookupError(text)

        try:
            return str(value(ast.parse(text.strip(), mode="eval").body))
        except LookupError as error:
            return unknown(str(error.args[0]))
        except (SyntaxError, ZeroDivisionError, RecursionError):
            return unknown(f"$(({text}))")

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
            return Launch(module, command.line, command.end, arguments[rest:], exported=environment)
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
                launch.followed_by = raw
                break
            if not last.cut:
                launch.cuts.append((last.end, "no backslash at the end of the line"))
            elif index + 1 and last is not commands[index] and last.cut:
                launch.cuts.append((last.cut_line, last.cut))
            launch.dropped += [Argument(text, word.line) for word in following.words for text in self.expand(word)]
            index, last = index + 1, following
        if not launch.dropped:
            launch.cuts = [cut for cut in launch.cuts if cut[1].startswith("a blank after") and not self._is_last(last)]
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
