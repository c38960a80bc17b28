"""What a word of a script becomes: variables, arrays, defaults, arithmetic. What is not known stays unknown."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

from esgrpo.tools.lint.words import Lexer, Word

UNKNOWN = re.compile("\0([^\0]*)\0")  # a part of a value that only the run will know, with its origin


def _quotient(left: int, right: int) -> int:
    """Division as in C: towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient,
               ast.Mod: lambda left, right: left - right * _quotient(left, right)}


def unknown(origin: str) -> str:
    return "\0" + re.sub(r"\s+", "_", origin) + "\0"


def is_unknown(text: str) -> bool:
    return "\0" in text


def home(text: str) -> str:
    """Tilde expansion, which bash does behind = and :- but not inside other words."""
    return unknown("HOME") + text[1:] if re.match(r"~(/|$)", text) else text


class Variables:
    """Variables of a script and the files that it is in, and words expanded with them."""

    def __init__(self, variables: dict[str, str]):
        self.variables: dict[str, str | list[str]] = dict(variables)
        self._files: list[Path] = []  # the script, and what it sources

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
        lexer = Lexer(home(text))
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
