"""What is read from a log without knowing the failure: exceptions, other signs of one, and how the log ends."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COLOUR = re.compile(r"\x1b?\[\d*(?:;\d+)*m")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
# what Ray, vLLM, torchrun, mpirun, srun and time-stamping wrappers put in front of a line, in any order and number
_PREFIX = re.compile(r"""
    \((?:\w[^()]*\s)?pid=\d+[^()]*\)\s? | \((?:raylet|autoscaler|gcs_server)[^()]*\)\s?
  | \[(?:rank|default)\d+\]:\s? | (?:worker|node|head)-?\d+(?::|\s+\|)\s | \[\d+,\d+\]<std(?:err|out)>:\s? | \d{1,4}:\s
  | \[\d{4}-\d\d-\d\d\s[\d:.,]+\s(?P<ray>[DIWEFC])\s\d+\s\d+\]\s
  | \[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?\s
  | (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s\d\d-\d\d\s\d\d:\d\d:\d\d\s\[?[\w./]+:\d+\]\s?""", re.VERBOSE)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_LEVEL = re.compile(r"[^'\"=]{0,40}?\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b(?=[\]:\s,|-])")
_WARNING = re.compile(r"[^'\"]{0,200}?\b\w*Warning: |[Ww]arning\b")  # Python names the file first
_RAY_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "C": "CRITICAL"}
TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception was", "During handling of the above exception")
_EXCEPTION = re.compile(r"(?:\w+\.)*(?!\w*Warning\b)[A-Z]\w*[a-z]\w*(?:: .*|:)?$")
_BY_ITS_NAME = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Timeout|Cancelled)(?:: .*|:)?$")
_IGNORED = ("Exception ignored in", "--- Logging error ---")
# verl shows prompts and responses of its validation between these; what a model wrote is no sign of anything
_QUOTES, _ENDS_QUOTE = ("[prompt]", "[response]"), ("[ground_truth]", "[score]")

# (how suspicious, what only such lines have, the line); searched without prefixes, the first column decides
ENDED, RAISED, LOGGED = 3, 2, 1
_SIGNS = (
    (ENDED, "Fatal Python error", r"Fatal Python error: "),
    (ENDED, "egmentation fault", r"egmentation fault"),
    (ENDED, "*** SIG", r"\*\*\* SIG(?:SEGV|ABRT|BUS|FPE|ILL)\b"),
    (ENDED, "ignal SIG", r"[Ss]ignal SIG(?:SEGV|KILL|ABRT|BUS)\b"),
    (ENDED, "by signal", r"by signal: "),
    (ENDED, "Bus error", r"Bus error"),
    (ENDED, "core dumped", r"core dumped"),
    (ENDED, "Killed", r"(?:^|[:\d]\s*)Killed(?:$|\s{2,})"),
    (ENDED, "Aborted", r"(?:^|[:\d]\s*)Aborted(?:$|\s{2,}|!)"),
    (ENDED, "terminate called", r"terminate called "),
    (ENDED, "oom", r"oom[-_]kill"),
    (ENDED, "OOM", r"OOM[- ]?[Kk]ill"),
    (ENDED, "ut of memory", r"[Oo]ut of memory"),
    (ENDED, "Out Of Memory", r"Out Of Memory"),
    (ENDED, "ut of bounds", r"ut of bounds"),
    (ENDED, "CUDA error", r"CUDA error"),
    (ENDED, "CUDA_ERROR", r"CUDA_ERROR_(?!$)\w+"),
    (ENDED, "_STATUS_", r"CU\w+_STATUS_(?!SUCCESS)\w+"),
    (ENDED, "Assertion", r"Assertion .*failed"),
    (ENDED, "NCCL error", r"NCCL error"),
    (ENDED, "nccl", r"\bnccl\w+Error\b"),
    (ENDED, "HCCL ", r"HCCL (?:function )?error|HCCL watchdog thread terminated"),
    (ENDED, "Inner Error", r"Inner Error!"),
    (ENDED, "ERR0", r"\bERR\d{5} "),
    (ENDED, "ERR9", r"\bERR\d{5} "),
    (ENDED, ": [PID", r"^E[A-Z]\w?\d{4}: \[PID"),
    (ENDED, "cannot be scheduled", r"cannot be scheduled"),
    (ENDED, "FAILED", r"\bFAILED\b(?! *[=:] *0)"),
    (ENDED, "does not apply", r"patch does not apply"),
    (ENDED, "not found", r": (?:command )?not found$|not found \(required by"),
    (ENDED, "No module named", r"^\S+: No module named \S+$"),
    (ENDED, "No such file", r"^[^'\"]*: No such file or directory$"),
    (ENDED, "ermission denied", r"^[^'\"]*: Permission denied$"),
    (ENDED, "unbound variable", r": unbound variable$"),
    (ENDED, "yntax error", r"[Ss]yntax error\b"),
    (ENDED, "undefined symbol", r"undefined symbol"),
    (ENDED, "cannot open shared object", r"cannot open shared object file"),
    (ENDED, "xit", r"(?:\b[Ee]xit(?:ed with)?:? (?:code|status):? ?|\bexitcode:? ?)\(?-?[1-9]\d*|non-zero exit"),
    (ENDED, "CANCELLED", r"CANCELLED AT|DUE TO TIME LIMIT|DUE TO PREEMPTION"),
    (ENDED, "panic", r"\bpanic: "),
    (ENDED, "ERROR", r"^\w[^=]{0,40}ERROR:? .*(?:[Cc]ould not|[Ff]ailed|[Cc]annot|conflict|[Nn]o matching)"),
    (RAISED, "rror", r"^(?:\S{1,60}: )?(?:\w+\.)*\w*Error(?:\(\w+\))?(?:: \S|:$|$)"),
    (RAISED, "xception", r"^(?:\S{1,60}: )?(?:\w+\.)*\w*Exception(?:\(\w+\))?(?:: \S|:$|$)"),
    (RAISED, "Interrupt", r"^KeyboardInterrupt"),
    (RAISED, "Error while", r"^\S+: Error while "),
    (LOGGED, "rror", r"^(?:\S{1,80}: )*(?:fatal )?[Ee]rror: \S|^\[?Error\]?: |^Error executing job|^Error in call to"),
    (LOGGED, "fatal", r"^fatal: "),
    (LOGGED, "ERROR", r"^\[?ERROR\b|\[ERROR\]| - ERROR - |\bERROR:"),
    (LOGGED, "CRITICAL", r"^\[?CRITICAL\b| - CRITICAL - |CRITICAL:"),
    (LOGGED, "rror", r"^E\d{4} \d\d:"),
)
SIGNS: dict[str, list[tuple[int, re.Pattern]]] = {}
for _rank, _word, _pattern in _SIGNS:
    SIGNS.setdefault(_word, []).append((_rank, re.compile(_pattern)))
# may be said of what is wrong, and of much else: shown, never believed
_HINT = re.compile(r"\b(?:[Ff]ail(?:ed|ure|s)|[Uu]nable to|[Cc]annot|refused|[Tt]imed out|[Ee]rrors?|died|exceeded)\b")
# lines that only a run that has done its work prints
FINISHED = {word: re.compile(pattern) for word, pattern in (
    ("Training Progress:", r"Training Progress: 100%"),
    ("Final validation metrics", r"Final validation metrics: "),
    ("total time: ", r"^total time: [\d.]+ seconds"),
    ("completed", r"^\[(?:ASYNC MAIN\] One component completed|FullyAsyncRollouter\] Rollouter fit completed)"),
    ("Total time for train", r"^Total time for train steps: "),
    ("Successfully installed", r"^Successfully installed "),
    ("succeeded", r"^Job '\w+' succeeded"),
    ("esgrpo: picture", r"^esgrpo: picture "))}
WORKING = ("Training Progress:", re.compile(r"Training Progress: +\d\d?%"))
# no line without one of these needs a look; the last are levels in the heads of Ray's own lines
WORDS = tuple(dict.fromkeys([*SIGNS, *FINISHED, " E ", " F ", " C "]))


def without_colours(text: str) -> str:
    """Of any number of lines; terminals' escapes go, also those of a copy that lost its escape characters."""
    text = _ESCAPE.sub("", text) if "\x1b" in text else text
    return _COLOUR.sub("", text) if "[0m" in text or "[36m" in text else text


def bare(line: str) -> tuple[str, str, str]:
    """(who printed it, its log level or "", the line without prefixes and colours); the indent of the line stays."""
    line = without_colours(line)
    prefixes, level = [], ""
    while (prefix := _PREFIX.match(line)) and prefix.end():
        if "pid=" in prefix.group() or "rank" in prefix.group():  # a time stamp is nobody
            prefixes.append(prefix.group().strip())
        level = prefix.group("level") or _RAY_LEVELS.get(prefix.group("ray") or "", level)
        line = line[prefix.end():]
    return " ".join(prefixes), level, _REPEATED.sub("", line)


def harmless(level: str, text: str) -> bool:
    """A line that says of itself that it is no error."""
    said = None if level else _LEVEL.match(text)
    level = level or (said.group(1) if said else "WARNING" if _WARNING.match(text) else "")
    return level in ("DEBUG", "INFO", "WARN", "WARNING")


def sign(level: str, text: str, words: Iterable[str]) -> int | None:
    """How suspicious a line of this level is that has these of WORDS; None when not at all."""
    if level in ("DEBUG", "INFO", "WARN", "WARNING"):
        return None
    rank = max((rank for word in words for rank, pattern in SIGNS.get(word, ()) if pattern.search(text)),
               default=LOGGED if level in ("ERROR", "CRITICAL", "FATAL") else None)
    return None if rank is not None and rank != RAISED and harmless(level, text) else rank


def hint(lines: list[str]) -> str:
    """The last of these lines that may have to do with a failure, "" without one."""
    said = ((level, text) for _, level, text in map(bare, reversed(lines)) if _HINT.search(text))
    return next((text.strip() for level, text in said if not harmless(level, text)), "")


class Chains:
    """Tracebacks of one process; of each chain of causes the first exception is the innermost."""

    def __init__(self):
        self.inside = self.found = self.ignored = self.after_frame = self.quoting = False
        self.innermost: list[tuple[int, str]] = []
        self.last = (0, "")  # of the traceback that is open

    @property
    def open(self) -> bool:
        return self.quoting or self.inside

    def feed(self, number: int, text: str) -> None:
        if text.startswith(_QUOTES):
            self.quoting = True
        elif text.startswith(_ENDS_QUOTE):
            self.quoting = False
        if self.quoting:
            return
        if text.startswith(_IGNORED):
            self.ignored = True
        elif text.startswith(_CHAINED):
            self.inside = True  # what follows is only how the exception was passed on
        elif text.endswith(TRACEBACK) and not text[:1].isspace():  # a progress bar may stand in the same line
            self.inside, self.found, self.last = True, self.inside and self.found, (number, text)
        elif self.inside and text[:1].isspace():
            self.after_frame, self.last = True, (number, text)
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

    @property
    def cut_off(self) -> tuple[int, str]:
        """Where the log leaves a traceback without its last line; (0, "") when it does not."""
        return self.last if self.inside and not self.found and not self.ignored else (0, "")
