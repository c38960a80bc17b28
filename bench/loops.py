"""How often the rule for loops takes for a loop what is none, and how soon it finds real ones. Standard library only.

    python -m bench.loops [--json] [--seed 0 --placements 100000 --seconds 35] [--results FILE]

False prunes: text that repeats itself without being a loop, placed in a response at a random token. Half of it is
cut from what is installed (the standard library with its tests and data, and installed packages: code, mathematics,
tables, numbers), half is made to be hard (long numbers, matrices, tables, rulers, tallies). It is read as three kinds
of tokens: one a character, one a digit, and words. No model has sampled it, so the model is taken to be certain of
every token (surprisal 0), the worst there can be: what is counted is what the length of the span alone lets through.
Nothing that is made is as long as that span. A list of 64 `0.000`, read character by character, would be, and would be
taken for a loop by a model that is certain of it; how often that happens in a run is what the audit measures. Recorded
responses of the testbed that ended by themselves are played with the log-probs that the model gave them.

Loops: those recorded by bench.testbed.record_loops, with their log-probs, found at most 512 tokens after their start.

The rule is the product's, with its defaults, in the product's own code. After `--seconds` no new placement is begun;
the number that was played is printed.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
try:
    import esgrpo  # noqa: F401
except ImportError:  # not installed: this command needs the repository and Python only
    sys.path.insert(0, str(ROOT / "overlay"))

from bench.common import console  # noqa: E402
from bench.common.provenance import add_results, write_record  # noqa: E402
from esgrpo.algo.segments import PRUNE, SegmentBook  # noqa: E402
from esgrpo.config import Prune, Repetition, Segment  # noqa: E402

RECORD = ROOT / "bench" / "results" / "loops_testbed.json.gz"
FOUND_WITHIN = 512  # tokens after the start of a loop
ALLOWED_FALSE, WANTED_FOUND = 1e-4, 0.95
EXCERPT = 1500  # characters of installed text in a placement
AROUND = 200  # characters of it before and after what is hard
FILES = 1500  # of each kind, at most; an excerpt of each is drawn several times
LARGEST_FILE = 1_000_000  # bytes
NO_BOUNDARY = 1 << 40  # segment length that no response reaches
SHOWN = 5  # false prunes printed
PROGRESS_S = 5.0


# Installed text. A kind is where to look and what the names end in.
def folders() -> dict[str, list[Path]]:
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    return {"standard library": [library], "packages": [packages]}


KINDS = {
    "code": (("standard library",), (".py",)),
    "mathematics": (("packages", "standard library"),
                    ("math", "sympy", "fraction", "decimal", "statistics", "matrices")),
    "tables and numbers": (("standard library", "packages"), (".csv", ".tsv", ".decTest", ".json", ".txt", ".dat")),
}


def _is_of(kind: str, path: str) -> bool:
    wanted = KINDS[kind][1]
    if kind == "mathematics":
        return path.endswith((".py", ".txt", ".decTest")) and any(word in path.lower() for word in wanted)
    return path.endswith(wanted)


def installed_files(rng: random.Random) -> dict[str, list[Path]]:
    """Kind -> files, at most FILES of each, in random order. Kinds without a file are left out."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for place, roots in folders().items():
        for root in roots:
            for path in sorted(_walk(root, skip="site-packages")):
                name = str(path.relative_to(root))
                for kind, (places, _) in KINDS.items():
                    if place in places and _is_of(kind, name):
                        found[kind].append(path)
    return {kind: rng.sample(files, min(FILES, len(files))) for kind, files in found.items() if files}


def _walk(root: Path, skip: str) -> Iterator[Path]:
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            if entry.name not in (skip, "__pycache__"):
                yield from _walk(entry, skip)
        elif entry.is_file():
            yield entry


class Corpus:
    """Excerpts of installed files; `used` counts the files that were read, by kind."""

    def __init__(self, rng: random.Random):
        self.rng, self.files, self.used = rng, installed_files(rng), Counter()
        self._turn = {kind: itertools.cycle(files) for kind, files in self.files.items()}
        self._texts: dict[Path, str] = {}

    def excerpt(self, kind: str, length: int) -> str:
        """`length` characters from a random place of the next file, fewer where the file is shorter."""
        for path in itertools.islice(self._turn[kind], len(self.files[kind])):
            text = self._texts.get(path)
            if text is None:
                text = self._texts[path] = self._read(path)
                self.used[kind] += bool(text)
            if text:
                start = self.rng.randrange(max(1, len(text) - length))
                return text[start:start + length]
        raise ValueError(f"no file of kind {kind} can be read")

    @staticmethod
    def _read(path: Path) -> str:
        try:
            return path.read_text("utf-8") if path.stat().st_size <= LARGEST_FILE else ""
        except (OSError, ValueError):  # ValueError: not UTF-8
            return ""


# What is hard: it repeats itself and is right. Lengths are those of textbooks, code and terminals.
def _round_number(rng):
    return "1" + "0" * rng.randint(3, 60)


def _bits(rng):
    width = rng.choice((8, 16, 32, 64, 128))
    return f"{1 << rng.randrange(width):0{width}b}"


def _hexadecimal(rng):
    return "0x" + f"{rng.randrange(16):0{rng.choice((8, 16, 32, 64))}x}"


def _decimal(rng):
    bottom, digits = rng.choice((3, 6, 7, 9, 11, 12, 13, 37, 99, 101, 111)), rng.randint(6, 100)
    top = rng.randrange(1, bottom)
    return f"{top}/{bottom} = 0." + str(top * 10**digits // bottom).zfill(digits) + "..."


def _decimals(rng):
    return "\n".join(_decimal(rng) for _ in range(20))


def _zeros(rng):
    entry = rng.choice(("0", "0.0", "1", "None", "[]", "0.000"))
    return "[" + ", ".join([entry] * rng.randint(4, 32)) + "]"


def _identity(rng):
    size, (before, between, after) = rng.randint(2, 16), rng.choice(
        (("[", ", ", "],"), ("", " & ", r" \\"), ("| ", " | ", " |"), ("", " ", "")))
    return "\n".join(before + between.join("1" if row == column else "0" for column in range(size)) + after
                     for row in range(size))


def _table(rng):
    columns, width, rows = rng.randint(2, 8), rng.randint(3, 14), rng.randint(2, 8)
    ruler = "+" + ("-" * width + "+") * columns
    lines = [ruler]
    for _ in range(rows):
        lines += ["|" + "|".join(f"{rng.choice((0, 0, 1, 17)):>{width}}" for _ in range(columns)) + "|", ruler]
    return "\n".join(lines)


def _markdown(rng):
    columns = rng.randint(2, 10)
    return "\n".join(["| x " * columns + "|", "|---" * columns + "|"]
                     + ["| 0 " * columns + "|" for _ in range(rng.randint(1, 4))])


def _ruler(rng):
    return "# " + rng.choice("-=#*~_") * rng.randint(20, 120)


def _blanks(rng):
    return "\n".join(" " * rng.randint(4, 60) + rng.choice(("pass", "}", "return x", ")")) for _ in range(6))


def _tally(rng):
    return rng.choice(("|", "x", "1 ", "ha", "AC", "1+", ". ", "na ")) * rng.randint(5, 50)


def _sum(rng):
    return rng.choice(("1 + ", "x*", "2 * ", "a, ")) * rng.randint(4, 40) + "1"


def _truth_table(rng):
    size = rng.randint(2, 5)
    return "\n".join(" ".join(f"{row:0{size}b}") + " | 0" for row in range(2**size))


def _steps(rng):
    value, step = rng.randrange(100), rng.randrange(1, 10)
    return "\n".join(f"Step {i}: x = {value + step * i}, so we go on." for i in range(rng.randint(4, 30)))


def _refrain(rng):
    line = rng.choice(("Row, row, row your boat\n", "therefore we are done.\n", "    i += 1\n", "wait\n0:12\n"))
    return line * rng.randint(2, 8)


HARD = {"round numbers": _round_number, "bits": _bits, "hexadecimals": _hexadecimal, "repeating decimal": _decimal,
        "twenty repeating decimals": _decimals, "list of one value": _zeros, "identity matrix": _identity,
        "ASCII table": _table, "Markdown table": _markdown, "ruler": _ruler, "indentation": _blanks, "tally": _tally,
        "sum of ones": _sum, "truth table": _truth_table, "steps": _steps, "refrain": _refrain}

# Words like those of byte-pair encodings: with the blank before, numbers in threes, punctuation and blanks in runs.
WORD = re.compile(r" ?[A-Za-z_]+|\d{1,3}|\n+|[^\S\n]{1,16}|([^\w\s])\1{0,15}|.", re.DOTALL)
DIGIT = re.compile(r" ?[A-Za-z_]+|\d|\n|[^\S\n]+|[^\w\s]|.", re.DOTALL)
TOKENS = {"characters": list, "digits": lambda text: [m.group() for m in DIGIT.finditer(text)],
          "words": lambda text: [m.group() for m in WORD.finditer(text)]}


@dataclass(frozen=True)
class Placement:
    """Tokens of a response that is no loop."""

    kind: str
    read_as: str
    tokens: list
    log_probs: list[float] | None = None  # None: the model is certain of every token


def placements(rng: random.Random, corpus: Corpus) -> Iterator[Placement]:
    """Installed text and hard text in turn, without an end."""
    kinds, hard, read_as = itertools.cycle(corpus.files), itertools.cycle(HARD.items()), itertools.cycle(TOKENS.items())
    while True:
        for made in (False, True):
            for kind in [next(kinds) for _ in corpus.files]:
                name, tokenize = next(read_as)
                if made:
                    what, make = next(hard)
                    text = (corpus.excerpt(kind, rng.randint(1, AROUND)) + make(rng)
                            + corpus.excerpt(kind, rng.randint(1, AROUND)))
                else:
                    what, text = kind, corpus.excerpt(kind, EXCERPT)
                yield Placement(what, name, tokenize(text))
        next(read_as)  # so that a kind meets every way to read it


def found_at(tokens: list, log_probs: list[float] | None, rule: Repetition, phase: int) -> int | None:
    """After how many tokens the rule takes the response for a loop; None: never.

    `phase` tokens of the response came before, so that looks fall on other tokens of it.
    """
    book = SegmentBook(Segment(enable=True, segment_length=NO_BOUNDARY, prune=Prune(repetition=rule)),
                       rule.check_interval)
    book.add("response", "group", 0, phase)
    sums = None if log_probs is None else [0.0, *itertools.accumulate(log_probs)]
    made: list = []
    while len(made) < len(tokens):
        made += tokens[len(made):len(made) + rule.check_interval - (phase + len(made)) % rule.check_interval]
        count = len(made)
        for key in book.advance():
            if book.look(key, made, (0.0 if sums is None else sums[count], count)).outcome == PRUNE:
                return count
    return None


def recorded() -> dict:
    """What bench.testbed.record_loops has recorded. Raises OSError when it is not there."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


def play(rule: Repetition, seed: int, count: int, seconds: float, say=lambda line: None) -> dict:
    """{"placements": {kind: {read_as: [played, false prunes]}}, "loops": [tokens from the start, or None], ...}."""
    end, rng = time.monotonic() + seconds, random.Random(seed)
    record = recorded()
    loops = []
    for loop in record["loops"]:
        at = found_at(loop["tokens"], loop["log_probs"], rule, rng.randrange(rule.check_interval))
        loops.append(None if at is None else at - loop["start"])
    corpus = Corpus(rng)
    table: dict[str, dict[str, list[int]]] = {}
    false, said = [], time.monotonic()
    samples = (Placement("recorded responses", "testbed", entry["tokens"], entry["log_probs"])
               for entry in record["others"])
    for number, placement in enumerate(itertools.islice(itertools.chain(samples, placements(rng, corpus)), count)):
        if time.monotonic() > end:
            break
        cell = table.setdefault(placement.kind, {}).setdefault(placement.read_as, [0, 0])
        at = found_at(placement.tokens, placement.log_probs, rule, rng.randrange(rule.check_interval))
        cell[0] += 1
        if at is not None:
            cell[1] += 1
            false.append((placement, at))
        if time.monotonic() > said + PROGRESS_S:
            said = time.monotonic()
            say(f"{number + 1} of {count} placements, {len(false)} false prunes")
    return {"placements": table, "false": false, "loops": loops, "record": record,
            "files": {kind: [corpus.used[kind], len(files)] for kind, files in corpus.files.items()}}


def summary(result: dict) -> dict:
    cells = [cell for row in result["placements"].values() for cell in row.values()]
    found = [at for at in result["loops"] if at is not None and at <= FOUND_WITHIN]
    return {"placements": sum(cell[0] for cell in cells), "false_prunes": sum(cell[1] for cell in cells),
            "loops": len(result["loops"]), "found_within_512": len(found) / max(1, len(result["loops"]))}


def details(result: dict, rule: Repetition) -> dict:
    """What a record has beside the summary."""
    made = ("min_span", "max_pattern_size", "max_surprisal", "check_interval")
    found = sorted(at for at in result["loops"] if at is not None)
    return {"rule": {name: getattr(rule, name) for name in made},
            "found_after": {"median": found[len(found) // 2], "most": found[-1]} if found else None,
            "by_kind": result["placements"], "files_read": {kind: used for kind, (used, _) in result["files"].items()},
            "false": [{"kind": placement.kind, "read_as": placement.read_as, "tokens": at}
                      for placement, at in result["false"][:SHOWN]],
            "recorded_by": {name: result["record"][name] for name in ("command", "commit", "seed")}}


def print_table(result: dict, rule: Repetition) -> None:
    print(f"rule: the last {rule.min_span} tokens or more repeat a pattern of at most {rule.max_pattern_size}, with a "
          f"mean surprisal of at most {rule.max_surprisal:g} nats a token; a look every {rule.check_interval} tokens\n")
    columns = [*TOKENS, "testbed"]
    print(f"{'false prunes / placements':28}" + "".join(f"{name:>14}" for name in columns))
    for kind, row in result["placements"].items():
        cells = ["" if name not in row else f"{row[name][1]} / {row[name][0]}" for name in columns]
        print(f"{kind:28}" + "".join(f"{cell:>14}" for cell in cells))
    for placement, at in result["false"][:SHOWN]:
        tail = placement.tokens[max(0, at - 24):at]
        print(f"false prune: {placement.kind}, {placement.read_as}, after {at} tokens: "
              + repr("".join(tail) if placement.log_probs is None else tail))
    found = sorted(at for at in result["loops"] if at is not None)
    record = result["record"]
    print(f"\nloops: {len(found)} of {len(result['loops'])} found"
          + (f", after {found[len(found) // 2]} tokens (median), {found[-1]} at most" if found else "")
          + f"\nrecorded by: {record['command']} (commit {record['commit']}, seed {record['seed']})")
    print("installed text: " + "; ".join(f"{kind}: {used} of {len_} files read" for kind, (used, len_) in
                                         result["files"].items()) + f"; Python {sys.version.split()[0]}")


def main(argv: list[str] | None = None) -> int:
    default = Repetition(enable=True)
    parser = console.command_line("bench.loops", __doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placements", type=console.count, default=100_000)
    parser.add_argument("--seconds", type=console.positive, default=35.0, help="begin no new placement after so many")
    parser.add_argument("--min-span", type=int, default=default.min_span, help="tokens; to compare other rules")
    parser.add_argument("--max-pattern-size", type=console.count, default=default.max_pattern_size, help="tokens")
    parser.add_argument("--max-surprisal", type=console.not_negative, default=default.max_surprisal,
                        help="nats a token")
    parser.add_argument("--check-interval", type=console.count, default=default.check_interval,
                        help="tokens between two looks")
    add_results(parser)
    options = parser.parse_args(argv)
    if options.min_span < 2 * options.max_pattern_size:
        parser.error(f"--min-span {options.min_span}: wanted at least twice --max-pattern-size")
    rule = Repetition(enable=True, min_span=options.min_span, max_pattern_size=options.max_pattern_size,
                      max_surprisal=options.max_surprisal, check_interval=options.check_interval)
    try:
        result = play(rule, options.seed, options.placements, options.seconds,
                      lambda line: print(f"bench.loops: {line}", file=sys.stderr, flush=True))
    except OSError as error:
        print(f"bench.loops | {error} | the record of the testbed's loops | nothing can be played | "
              "python -m bench.testbed.record_loops", file=sys.stderr)
        return 1
    found = summary(result)
    if options.results:
        write_record(options.results, "bench.loops", argv, (options.seed,), {**found, **details(result, rule)})
    if options.json:
        print(json.dumps(found))
    else:
        print_table(result, rule)
    good = (found["false_prunes"] <= ALLOWED_FALSE * found["placements"] and found["found_within_512"] >= WANTED_FOUND)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
