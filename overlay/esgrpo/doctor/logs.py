"""Which known failure a training log holds: cause, fix, and who cures it. The failures are signatures.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from esgrpo import compat
from esgrpo.errors import EsgrpoError, plain

FILE = Path(__file__).with_name("signatures.toml")
WEIGHTS = ("root", "effect", "symptom", "notice")  # see signatures.toml
SHOWN = 160  # characters of a log line in the answer
_COLOUR = re.compile(r"\x1b?\[\d*(?:;\d+)*m")
# what Ray, vLLM, torchrun and time-stamping wrappers put in front of a line, in any order and number
_PREFIX = re.compile(r"""
    \((?:\w[^()]*\s)?pid=\d+[^()]*\)\s? | \(raylet[^()]*\)\s?
  | \[rank\d+\]:\s? | (?:worker|node)-?\d+:\s
  | \[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?\s
  | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s\d\d-\d\d\s\d\d:\d\d:\d\d\s\[?[\w./]+:\d+\]\s?""", re.VERBOSE)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception was", "During handling of the above exception")
_EXCEPTION = re.compile(r"(?:\w+\.)*(?!\w*Warning\b)[A-Z]\w*[a-z]\w*(?:: .*|:)?$")
_BY_ITS_NAME = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Timeout|Cancelled)(?:: .*|:)?$")
_IGNORED = ("Exception ignored in", "--- Logging error ---")
# ends of a process that leave no traceback
_FATAL = re.compile(r"Fatal Python error: |Segmentation fault|\*\*\* SIG(?:SEGV|ABRT|BUS|FPE|ILL) received|Killed$"
                    r"|\S+: line \d+:\s+\d+ (?:Killed|Aborted|Segmentation fault)|(?:ERROR|error): |\S+: Error while ")


@dataclass(frozen=True)
class Signature:
    """One known failure."""

    slug: str
    patterns: tuple[re.Pattern, ...]
    cause: str
    fix: str
    evidence: tuple[str, ...]
    zh: str
    excerpt: str
    weight: str = "root"
    cured_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """A signature in a log: first line (from 1), what it said, and how many lines say it."""

    signature: Signature
    line: int
    text: str
    groups: dict[str, str]
    last: int = 0
    count: int = 0

    def filled(self, text: str) -> str:
        for name, value in self.groups.items():
            text = text.replace("{" + name + "}", value or "?")
        return text


@dataclass
class Answer:
    """Matches, best first, and the innermost exception that no signature knows ("" without one)."""

    matches: list[Match] = field(default_factory=list)
    innermost: str = ""
    line: int = 0

    @property
    def state(self) -> str:
        if self.matches and self.matches[0].signature.weight != "notice":
            return "known"
        return "unknown" if self.innermost else "notice" if self.matches else "clean"


@cache
def signatures() -> tuple[Signature, ...]:
    """All entries. Raises EsgrpoError naming the entry that is wrong."""
    found = []
    for entry in compat.toml(FILE)["signature"]:
        entry = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        try:
            entry["patterns"] = tuple(re.compile(pattern) for pattern in entry["patterns"])
            found.append(Signature(**entry))
        except (KeyError, TypeError, re.error) as error:
            raise EsgrpoError(f"{FILE.name} {entry.get('slug')}", str(error), "the keys that its head explains",
                              "no log can be read", "correct the entry") from None
    return tuple(found)


def bare(line: str) -> tuple[str, str]:
    """(who printed it, the line without prefixes and colours); the indent of the line stays."""
    line = _COLOUR.sub("", line.rstrip("\r\n").rpartition("\r")[2])
    prefixes = []
    while (prefix := _PREFIX.match(line)) and prefix.end():
        if "pid=" in prefix.group() or "rank" in prefix.group():  # a time stamp is nobody
            prefixes.append(prefix.group().strip())
        line = line[prefix.end():]
    return " ".join(prefixes), _REPEATED.sub("", line)


class _Chains:
    """Tracebacks of one process; of each chain of causes the first exception is the innermost."""

    def __init__(self):
        self.inside = self.found = self.ignored = self.after_frame = False
        self.innermost: list[tuple[int, str]] = []

    def feed(self, number: int, text: str) -> None:
        if text.startswith(_IGNORED):
            self.ignored = True
        elif text.startswith(_CHAINED):
            self.inside = True  # what follows is only how the exception was passed on
        elif text.startswith(_TRACEBACK):
            self.inside, self.found = True, self.inside and self.found
        elif self.inside and text[:1].isspace():
            self.after_frame = True
            return
        elif self.inside and text and "ray::" not in text:  # that is a wrapper, the frames of the other process follow
            self._unindented(number, text)
        self.after_frame = False

    def _unindented(self, number: int, text: str) -> None:
        """The exception; or, where other lines of this process came between, only what is called like one."""
        if (_EXCEPTION if self.after_frame else _BY_ITS_NAME).match(text):
            if not self.found and not self.ignored:
                self.innermost.append((number, text))
            self.found, self.inside, self.ignored = True, False, False


def read(lines: Iterable[str]) -> Answer:
    """What a log says, in one pass over its lines."""
    patterns = [(pattern, signature) for signature in signatures() for pattern in signature.patterns]
    first: dict[str, Match] = {}
    chains: dict[str, _Chains] = {}
    fatal = (0, "")
    for number, raw in enumerate(lines, 1):
        who, text = bare(raw)
        chains.setdefault(who, _Chains()).feed(number, text)
        if not fatal[0] and _FATAL.match(text):
            fatal = number, text
        for pattern, signature in patterns:  # one by one: re finds what begins with plain text much faster than a|b|c
            if hit := pattern.search(text):
                seen = first.get(signature.slug) or Match(signature, number, text.strip(), {})
                first[signature.slug] = replace(seen, groups={**hit.groupdict(), **seen.groups}, last=number,
                                                count=seen.count + (seen.last != number))
    matches = sorted(first.values(), key=lambda m: (WEIGHTS.index(m.signature.weight), m.line))
    ends = [(who == "", *found) for who, chain in chains.items() for found in chain.innermost]
    # the driver's last exception, else the last of any process, else the first other sign of an end
    ends = [found[1:] for found in sorted(ends, reverse=True)] + [fatal]
    unknown = [(line, text) for line, text in ends if not any(pattern.search(text) for pattern, _ in patterns)]
    line, innermost = unknown[0] if unknown else (0, "")
    return Answer(matches, innermost, line)


def render(answer: Answer) -> str:
    """The lines cause:, fix:, cured by: of the first match, the others in one line each."""
    state = answer.state
    if state == "clean":
        return "clean: no known failure and no exception"
    unknown = f"innermost: {answer.innermost[:SHOWN]} (line {answer.line})"
    if state == "unknown":
        lines = ["unknown: no signature knows this failure", unknown]
        rest = answer.matches
    else:
        best, rest = answer.matches[0], answer.matches[1:]
        lines = [f"{best.signature.slug} (line {best.line}, {best.count}x): {best.text[:SHOWN]}",
                 f"cause: {best.filled(best.signature.cause)}",
                 f"fix: {best.filled(best.signature.fix)}",
                 f"cured by: {'; '.join(best.signature.cured_by) or 'none'}",
                 f"seen in: {', '.join(best.signature.evidence)}"]
        if best.signature.weight != "root" and answer.innermost:
            lines.append(unknown)
    return "\n".join(map(plain, lines + [f"also ({m.signature.weight}): {m.signature.slug} (line {m.line}): "
                              f"{m.filled(m.signature.cause)}" for m in rest]))


def as_dict(answer: Answer) -> dict:
    return {"state": answer.state, "innermost": answer.innermost, "line": answer.line, "matches": [
        {"slug": m.signature.slug, "weight": m.signature.weight, "line": m.line, "count": m.count, "text": m.text,
         "cause": m.filled(m.signature.cause), "fix": m.filled(m.signature.fix),
         "cured_by": list(m.signature.cured_by), "evidence": list(m.signature.evidence)} for m in answer.matches]}


def read_file(name: str) -> Answer:
    """A file, or standard input as "-". Raises EsgrpoError when it cannot be read."""
    if name == "-":
        if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text must not end the doctor
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        return read(sys.stdin)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return read(file)
    except OSError as error:
        raise EsgrpoError("doctor --log", f"{name}: {error.strerror}", "a readable log", "nothing was looked at",
                          "give the file, or - for standard input") from None
