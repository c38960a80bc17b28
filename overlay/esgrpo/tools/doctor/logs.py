"""Which known failure a training log holds: cause, fix, and who cures it. The failures are signatures.toml.

Only a log that ends as a finished run does, and in which nothing looks like an error, is called clean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

from esgrpo import compat
from esgrpo.errors import EsgrpoError, plain
from esgrpo.tools import language, log_source
from esgrpo.tools.doctor import signs

try:  # the parser of regular expressions moved in Python 3.11; only their literal parts are asked for
    from re import _parser as regex_parser
except ImportError:
    import sre_parse as regex_parser

FILE = Path(__file__).with_name("signatures.toml")
TEXTS = Path(__file__).with_name("texts.toml")
WEIGHTS = ("before", "root", "effect", "symptom", "echo", "notice")  # see signatures.toml
CONSEQUENCES = ("effect", "symptom", "echo")
# what a log can be, and the exit code of each; 2 is what all commands use where they cannot work
EXIT_CODES = {"clean": 0, "known": 1, "unknown": 3, "unfinished": 4, "unreadable": 5, "empty": 6}
SHOWN = 160  # characters of a log line in the answer
BATCH = 2_000  # lines that are looked at together
SHAPES = 200_000  # of lines, numbers left out, that are remembered
DIGITS = b"0123456789"
JOINED = 50  # suspicious lines that are also read together with the line after them: terminals and editors wrap
# parts that patterns share: one of these is looked for instead of many, and a pattern's own part where it is found
SHARED = ("rror", "ailed", "xception", "not found", "equire", "upport", "must be", "annot ", "imeout", "imed out",
          "valid", "n't ", "Could n", "_STATUS_", "ceeded", "emory", "onnect", "ystem", "torch.", "ssert", "CCL ",
          "nknown", "FAILED", "larger than", "ttention", "ivisible", "ignal", "does not", "No such file", "has no ",
          "ettings", "ermission", "emperature", "illed", "eight", "resume", "eckpoint", "megatron",
          "issing", "expect", "egist", "older", "ersion")


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
    """Matches, best first; the innermost exception, else the most suspicious line, that no signature knows ("" without
    one); and how the log ends."""

    matches: list[Match] = field(default_factory=list)
    innermost: str = ""
    line: int = 0
    lines: int = 0
    finished: bool = False
    last: str = ""
    last_line: int = 0
    hint: str = ""  # a line that may only be a warning; it makes no log suspicious
    packed: str = ""
    problem: str = ""
    raised: bool = False  # innermost is the end of a traceback

    @property
    def state(self) -> str:
        if self.problem and not self.lines:
            return "unreadable"
        weight = self.matches[0].signature.weight if self.matches else "notice"
        if weight not in ("echo", "notice") and not (weight == "symptom" and self.raised):
            return "known"
        if self.innermost:
            return "unknown"
        if not self.last:
            return "empty"
        return "clean" if self.finished and not self.problem else "unfinished"


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


def _parts(parsed) -> list[list[str]]:
    """Plain parts of a regular expression, one list for each of its alternatives."""
    ways = [[""]]
    for code, value in parsed:
        if str(code) == "LITERAL":
            ways = [[*way[:-1], way[-1] + chr(value)] for way in ways]
        elif str(code) == "BRANCH":
            ways = [[*way[:-1], way[-1] + other[0], *other[1:]] for way in ways for branch in value[1]
                    for other in _parts(branch)]
        elif str(code) != "AT":  # an anchor has no width
            ways = [[*way, ""] for way in ways]
    return ways


@cache
def literals(pattern: re.Pattern) -> frozenset[str]:
    """One of these is in every line that this pattern finds: for each of its alternatives the longest plain part."""
    return frozenset(max(parts, key=len) for parts in _parts(regex_parser.parse(pattern.pattern)))


def _by_word() -> dict[str, list[tuple[str, re.Pattern, Signature]]]:
    """Patterns and their parts, by what a line must have for them; the signs need lines, too."""
    words: dict[str, list[tuple[str, re.Pattern, Signature]]] = {word: [] for word in signs.WORDS}
    for signature in signatures():
        for pattern in signature.patterns:
            for part in literals(pattern):
                word = next((word for word in SHARED if word in part), part)
                words.setdefault(word, []).append((part, pattern, signature))
    return words


class _Reader:
    """One pass over a log."""

    def __init__(self):
        self.words = _by_word()
        # numbers are left out where words are looked for: lines that differ in numbers alone are looked at once
        self.gates = {word: word.encode().translate(None, DIGITS) for word in self.words}
        self.seen: dict[bytes, tuple[str, ...]] = {}
        # of each word the longest run without a blank, and in which of these a token was seen to be
        self.cores = {word: max(gate.split(), key=len) for word, gate in self.gates.items()}
        self.tokens: dict[bytes, tuple[str, ...]] = {}
        self.first: dict[str, Match] = {}
        self.counts: dict[str, tuple[int, int]] = {}  # last line and number of lines
        self.looked: dict[tuple[str, str], tuple[list[tuple[Signature, dict[str, str]]], int | None]] = {}
        self.chains: dict[str, signs.Chains] = {}
        self.suspects: list[tuple[float, int, str]] = []  # rank, line, text
        self.last = ""
        self.recent: list[str] = []
        self.joined = self.lines = self.last_line = self.finished = self.working = 0

    def batch(self, lines: list[str]) -> None:
        block = signs.without_colours("\n".join(line.rstrip("\r\n") for line in lines))
        lines = block.split("\n")
        if said := [index for index, line in enumerate(lines) if line and not line.isspace()]:
            self.last, self.last_line = lines[said[-1]].strip(), self.lines + said[-1] + 1
        self.recent = self.recent[-BATCH // 4:] + lines if len(lines) < BATCH // 4 else lines
        found = self._found(block)
        if signs.TRACEBACK in block or "[prompt]" in block or any(chain.open for chain in self.chains.values()):
            wanted: Iterable[int] = range(len(lines))
        else:
            wanted = sorted(found)
        for index in wanted:
            line = lines[index]
            for part in line.split("\r") if "\r" in line else (line,):
                self._line(self.lines + index + 1, part, found.get(index, ()), lines[index + 1:index + 2])
        self.lines += len(lines)

    def _found(self, block: str) -> dict[int, tuple[str, ...]]:
        """Which lines of a batch need a look, and for which words."""
        shapes = block.encode("utf-8", "replace").translate(None, DIGITS).split(b"\n")
        here = set(shapes)
        fresh = here.difference(self.seen)
        if len(self.seen) > SHAPES:
            self.seen = {shape: self.seen[shape] for shape in here - fresh}
        self.seen.update(dict.fromkeys(fresh, ()))
        for word in self._words_in(b"\n".join(fresh)):
            gate = self.gates[word]
            for shape in [shape for shape in fresh if gate in shape]:
                self.seen[shape] += (word,)
        return {index: words for index, shape in enumerate(shapes) if (words := self.seen[shape])}

    def _words_in(self, text: bytes) -> list[str]:
        """Words that may be in a text, in their order. Few tokens of a batch are new, and only these are searched."""
        if len(self.tokens) > SHAPES:
            self.tokens = {}
        tokens = set(text.split())
        if new := tokens.difference(self.tokens):
            joined = b"\n".join(new)
            cores = [(word, core) for word, core in self.cores.items() if core in joined]
            self.tokens.update((token, tuple(word for word, core in cores if core in token)) for token in new)
        possible = set().union(*{self.tokens[token] for token in tokens})
        return [word for word in self.gates if word in possible and self.gates[word] in text]

    def _line(self, number: int, line: str, words: Iterable[str], following: list[str]) -> None:
        who, level, text = signs.bare(line)
        chain = self.chains.get(who)
        if chain is None:
            chain = self.chains[who] = signs.Chains()
        ignored = chain.ignored  # this line may be the last of what Python ignored
        chain.feed(number, text)
        if chain.quoting or not words:
            return
        if (looked := self.looked.get((level, text))) is None:  # ranks and retries print the same line again and again
            looked = self._hits(level, text, words), signs.sign(level, text, words)
            if len(self.looked) < SHAPES:
                self.looked[level, text] = looked
        hits, rank = looked
        self._found_in(number, text, hits)
        self._progress(number, text, words)
        if rank is None or any(signature.weight != "echo" for signature, _ in hits):
            return
        if following and self.joined < JOINED:
            self.joined += 1
            start = text.rstrip()
            both = f"{start} {signs.bare(following[0])[2].strip()}"
            hits = self._hits(level, both, [word for word in self.words if word in both], len(start))
            self._found_in(number, both, hits)
            if hits:
                return
        if not ignored:
            self.suspects.append((rank, number, text))
            if len(self.suspects) > BATCH:  # of a log full of errors the first of each rank are enough
                self.suspects = sorted(self.suspects, key=lambda suspect: (-suspect[0], suspect[1]))[:BATCH // 2]

    def _hits(self, level: str, text: str, words: Iterable[str],
              over: int | None = None) -> list[tuple[Signature, dict[str, str]]]:
        """Signatures that find this line, and what their groups found; with `over` only what stands on both sides."""
        found = []
        for word in words:
            for part, pattern, signature in self.words[word]:
                hit = pattern.search(text) if part in text else None
                if not hit or over is not None and not hit.start() < over < hit.end():
                    continue
                if signature.weight not in CONSEQUENCES or not signs.harmless(level, text):
                    found.append((signature, hit.groupdict()))
        return found

    def _found_in(self, number: int, text: str, hits: list[tuple[Signature, dict[str, str]]]) -> None:
        for signature, groups in hits:
            seen = self.first.setdefault(signature.slug, Match(signature, number, text.strip(), groups))
            if groups.keys() - seen.groups.keys():
                self.first[signature.slug] = replace(seen, groups={**groups, **seen.groups})
            last, count = self.counts.get(signature.slug, (0, 0))
            self.counts[signature.slug] = number, count + (last != number)

    def _progress(self, number: int, text: str, words: Iterable[str]) -> None:
        if any(word in signs.FINISHED and signs.FINISHED[word].search(text) for word in words):
            self.finished = number
        elif signs.WORKING[0] in text and signs.WORKING[1].search(text):
            self.working = number

    def answer(self) -> Answer:
        found = [replace(match, last=self.counts[slug][0], count=self.counts[slug][1])
                 for slug, match in self.first.items()]
        matches = sorted(found, key=lambda m: (WEIGHTS.index(m.signature.weight), m.line))
        patterns = [p for signature in signatures() if signature.weight != "echo" for p in signature.patterns]
        ends = [(who == "", *found) for who, chain in self.chains.items() for found in chain.innermost]
        # a traceback that the log leaves open says more than what processes only logged
        suspects = self.suspects + [(signs.LOGGED + .5, *chain.cut_off) for chain in self.chains.values()
                                    if chain.cut_off[0]]
        # the driver's last exception, else the last of any process, else the most suspicious line, the first of these
        ends = [(*found[1:], True) for found in sorted(ends, reverse=True)]
        ends += [(*found[1:], False) for found in sorted(suspects, key=lambda suspect: (-suspect[0], suspect[1]))]
        ends += [(match.line, match.text, False) for match in matches if match.signature.weight == "echo"]
        line, innermost, raised = next((end for end in ends if not any(p.search(end[1]) for p in patterns)),
                                       (0, "", False))
        return Answer(matches, innermost, line, self.lines, self.finished > self.working, self.last,
                      self.last_line, signs.hint(self.recent), raised=raised)


def read(lines: Iterable[str]) -> Answer:
    """What a log says, in one pass over its lines."""
    reader, rest = _Reader(), iter(lines)
    while batch := list(islice(rest, BATCH)):
        reader.batch(batch)
    return reader.answer()


def read_file(name: str) -> Answer:
    """A file, plain or packed, or standard input as "-". Raises EsgrpoError when it cannot be opened."""
    with log_source.opened(name, "doctor --log") as raw:
        try:
            opened = log_source.Source(raw)
        except log_source.Unreadable as error:
            return Answer(problem=str(error))
        answer = read(opened)
        return replace(answer, packed=opened.packed, problem=opened.cut)


def _say(name: str, /, **values) -> str:
    return language.texts(TEXTS, name, **values)


def _explained(match: Match) -> str:
    """Cause alone, or cause and fix in Chinese."""
    return match.filled(match.signature.zh if language.spoken() == "zh" else match.signature.cause)


def render(answer: Answer) -> str:
    """What is wrong; of the best match the lines cause:, fix:, cured by:, of others one line each; what was read."""
    state, rest = answer.state, answer.matches
    unknown = _say("innermost", text=answer.innermost[:SHOWN], line=answer.line)
    if state == "known":
        best, rest = answer.matches[0], [m for m in answer.matches[1:] if m.signature.weight != "echo"]
        lines = [_say("found", slug=best.signature.slug, line=best.line, count=best.count, text=best.text[:SHOWN]),
                 _say("cause", text=_explained(best)), _say("fix", text=best.filled(best.signature.fix)),
                 _say("cured", text="; ".join(best.signature.cured_by) or _say("none")),
                 _say("seen", text=", ".join(best.signature.evidence))]
        if best.signature.weight not in ("before", "root") and answer.innermost:
            lines.append(unknown)
    else:
        lines = [_say(state, problem=answer.problem)]
        lines += {"unknown": [unknown], "unfinished": [_say("last", text=answer.last[:SHOWN], line=answer.last_line)]
                  + [_say("hint", text=answer.hint[:SHOWN])] * bool(answer.hint)}.get(state, [])
    lines += [_say("also", weight=m.signature.weight, slug=m.signature.slug, line=m.line, text=_explained(m))
              for m in rest]
    if state != "unreadable":
        lines.append(_say("read", lines=answer.lines, packed=_say("packed", packed=answer.packed) * bool(answer.packed),
                          cut=_say("cut", problem=answer.problem) * bool(answer.problem)))
    return "\n".join(plain(line) for line in lines if line)


def as_dict(answer: Answer) -> dict:
    return {"state": answer.state, "innermost": answer.innermost, "line": answer.line, "lines": answer.lines,
            "finished": answer.finished, "last": answer.last, "last_line": answer.last_line,
            "hint": answer.hint, "packed": answer.packed,
            "problem": answer.problem, "matches": [
        {"slug": m.signature.slug, "weight": m.signature.weight, "line": m.line, "count": m.count, "text": m.text,
         "cause": m.filled(m.signature.cause), "fix": m.filled(m.signature.fix), "zh": m.filled(m.signature.zh),
         "cured_by": list(m.signature.cured_by), "evidence": list(m.signature.evidence)} for m in answer.matches]}
