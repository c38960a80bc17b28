"""Words and commands of a shell script with line numbers, split as bash splits them. Nothing is run.

Known: quoting, line continuations, comments, expansions (kept as text), arrays, here-documents, redirections and
reserved words. What ended a command is kept, since a command that ends by accident is what `lint` looks for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RESERVED = frozenset(("if", "then", "elif", "else", "fi", "while", "until", "do", "done", "{", "}", "!", "time"))
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")")
REDIRECTION = re.compile(r"\d*(<<<|<<-?|>>|>&|<&|&>>|&>|>\||<>|>|<)")
GONE_WRONG = re.compile(r"\\[ \t\r]+(#[^\n]*)?(?=\n)")  # a backslash that does not stand at the end of its line


@dataclass
class Word:
    """Pieces are (kind, text, quoted); kind is text, variable, arithmetic or command."""

    line: int
    pieces: list[tuple[str, str, bool]] = field(default_factory=list)
    array: list[Word] | None = None  # NAME=(...)

    @property
    def plain(self) -> str:
        """The literal text, expansions left out."""
        return "".join(text for kind, text, _ in self.pieces if kind == "text")


@dataclass
class Command:
    words: list[Word]
    line: int
    end: int = 0
    operator: str = "\n"  # what follows it
    cut: str = ""  # why a line continuation did not continue, by its name in findings.toml
    cut_line: int = 0


@dataclass
class Comment:
    line: int
    text: str


class Lexer:
    """One pass over a text; `commands` and `comments` are the result."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text, 0, line
        self.commands: list[Command] = []
        self.comments: list[Comment] = []
        self._heredocs: list[str] = []
        self._command = Command([], line)

    def _take(self, count: int = 1) -> str:
        taken = self.text[self.at:self.at + count]
        self.at += count
        self.line += taken.count("\n")
        return taken

    def _ahead(self, *options: str) -> str:
        return next((o for o in options if self.text.startswith(o, self.at)), "")

    def scan(self) -> Lexer:
        while self.at < len(self.text):
            self._step()
        self._end("eof")
        return self

    def _step(self) -> None:
        if self._skip_blank():
            return
        if self._ahead("\n"):
            self._end("\n")
            self._take()
            self._skip_heredocs()
        elif self._ahead("#"):
            self._comment()
        elif self._in_double_brackets():
            self._add(self._word(" \t\n;"))
        elif self._redirection():
            pass
        elif operator := self._ahead(*OPERATORS):
            self._take(len(operator))
            self._end(operator)
        else:
            self._add(self._word())

    def _skip_blank(self) -> bool:
        """Blanks, continuations, and notes on continuations that fail."""
        if self._ahead(" ", "\t", "\r"):
            self._take()
            return True
        if self.text[self.at:] == "\\":  # the last character of the file
            self._take()
            return True
        if wrong := GONE_WRONG.match(self.text, self.at):
            self._cut("blank_after_backslash")
            self._take(wrong.end() - self.at)
            return True
        if not self._ahead("\\\n"):
            return False
        line = self.line
        self._take(2)
        rest = self.text[self.at:].split("\n", 1)[0].strip()
        if not rest or rest.startswith("#"):
            self._cut("comment_after_continuation" if rest else "blank_line_after_continuation", line)
        return True

    def _cut(self, why: str, line: int = 0) -> None:
        self._command.cut, self._command.cut_line = why, line or self.line

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        self.comments.append(Comment(self.line, self.text[self.at:end]))
        self._take(end - self.at)

    def _in_double_brackets(self) -> bool:
        words = [word.plain for word in self._command.words]
        return words[:1] == ["[["] and "]]" not in words

    def _redirection(self) -> bool:
        """Skips a redirection with its target. The body of a here-document is skipped at the next newline."""
        found = REDIRECTION.match(self.text, self.at)
        if not found:
            return False
        self._take(found.end() - self.at)
        while self._ahead(" ", "\t"):
            self._take()
        target = self._word()
        if found.group(1) in ("<<", "<<-"):
            self._heredocs.append(target.plain)
        return True

    def _skip_heredocs(self) -> None:
        for delimiter in self._heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end + 1
                if self._take(end - self.at).strip() == delimiter:
                    break
        self._heredocs = []

    def _add(self, word: Word) -> None:
        if not self._command.words:
            self._command.line = word.line
        self._command.words.append(word)
        first = self._command.words[0].plain
        if len(self._command.words) == 1 and first in RESERVED and all(not p[2] for p in word.pieces):
            self._end("reserved")

    def _end(self, operator: str) -> None:
        command = self._command
        command.operator, command.end = operator, self.line
        if command.words or operator in (")", ";;"):
            self.commands.append(command)
        self._command = Command([], self.line)

    def _word(self, stops: str = " \t\r\n;|&()<>") -> Word:
        word = Word(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and ARRAY.search(word.plain) and len(word.pieces) == 1:
                word.array = self._array()
                break
            if char in stops or GONE_WRONG.match(self.text, self.at) or self.text[self.at:] == "\\":
                break
            if char == "'" or self._ahead("$'"):
                self._take(1 if char == "'" else 2)
                end = self.text.find("'", self.at)
                word.pieces.append(("text", self._take((end if end >= 0 else len(self.text)) - self.at), True))
                self._take()
            elif char == '"':
                self._take()
                self._double_quoted(word)
            elif char == "\\":
                self._take()
                escaped = self._take()
                if escaped != "\n":
                    word.pieces.append(("text", escaped, True))
                elif self._after_glued_continuation():
                    break
            elif not self._expansion(word, False):
                self._text(word, self._take(), False)
        return word

    def _after_glued_continuation(self) -> bool:
        """`word\\` with the next line's first character: the word goes on there, or the line is blank or a comment."""
        rest = self.text[self.at:].split("\n", 1)[0].strip()
        if not rest or rest.startswith("#"):
            self._cut("comment_after_continuation" if rest else "blank_line_after_continuation",
                      self.line - 1)
        return self.text[self.at:self.at + 1] in (" ", "\t", "\n", "")

    @staticmethod
    def _text(word: Word, text: str, quoted: bool) -> None:
        if word.pieces and word.pieces[-1][0] == "text" and word.pieces[-1][2] == quoted:
            word.pieces[-1] = ("text", word.pieces[-1][1] + text, quoted)
        else:
            word.pieces.append(("text", text, quoted))

    def _double_quoted(self, word: Word) -> None:
        self._text(word, "", True)
        while self.at < len(self.text) and not self._ahead('"'):
            if self._ahead("\\"):
                escaped = self._take(2)[1:]
                self._text(word, "" if escaped == "\n" else escaped if escaped in '"\\$`' else "\\" + escaped, True)
            elif not self._expansion(word, True):
                self._text(word, self._take(), True)
        self._take()

    def _expansion(self, word: Word, quoted: bool) -> bool:
        """$NAME, ${...}, $((...)), $(...) or `...`."""
        if self._ahead("$(("):
            word.pieces.append(("arithmetic", self._balanced(1, "(", ")")[2:-2], quoted))
        elif self._ahead("$("):
            word.pieces.append(("command", self._balanced(1, "(", ")")[1:-1], quoted))
        elif self._ahead("${"):
            word.pieces.append(("variable", self._balanced(1, "{", "}")[1:-1], quoted))
        elif self._ahead("`"):
            end = self.text.find("`", self.at + 1)
            word.pieces.append(("command", self._take((end if end >= 0 else len(self.text)) + 1 - self.at)[1:-1],
                                quoted))
        elif name := re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(self.text, self.at):
            self._take(name.end() - self.at)
            word.pieces.append(("variable", name.group(1), quoted))
        else:
            return False
        return True

    def _balanced(self, skip: int, opening: str, closing: str) -> str:
        """From the bracket that stands `skip` characters ahead to its partner, both included."""
        self._take(skip)
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self._take()
            if char == "\\":
                self._take()
            elif char == "'" and opening == "(" and "'" in self.text[self.at:]:
                self._take(self.text.index("'", self.at) + 1 - self.at)
            depth += (char == opening) - (char == closing)
            if depth == 0:
                break
        return self.text[start:self.at]

    def _array(self) -> list[Word]:
        """Elements of NAME=(...): newlines separate like blanks, so nothing can be cut off here."""
        self._take()
        elements = []
        while self.at < len(self.text) and not self._ahead(")"):
            if self._ahead(" ", "\t", "\r", "\n"):
                self._take()
            elif self._ahead("\\\n"):
                self._take(2)
            elif self._ahead("#"):
                self._comment()
            else:
                before = self.at
                elements.append(self._word())
                if self.at == before:
                    self._take()
        self._take()
        return elements
