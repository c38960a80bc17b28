"""The corpus of log excerpts under logs/corpus: how it is written down, wrapped as real logs are, and judged."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

from esgrpo.tools.doctor import logs

CORPUS = Path(__file__).with_name("logs") / "corpus"
BEFORE = ["(TaskRunner pid=811) Total training steps: 105",
          "Training Progress:   0%|          | 0/105 [00:00<?, ?it/s]",
          "(TaskRunner pid=811) step:1 - actor/entropy:0.52 - actor/grad_norm:0.31 - critic/score/mean:0.12"]
WRAPPED = {  # what stands in front of each line
    "": "", "ray": "\x1b[36m(WorkerDict pid=8420, ip=10.0.0.7)\x1b[0m ", "rank": "[rank3]: ", "srun": "3: ",
    "vllm": "(EngineCore_DP0 pid=31) ERROR 09-03 11:03:37 [core.py:712] ", "time": "2026-03-12 11:17:32,123 "}


@dataclass(frozen=True)
class Excerpt:
    """expected: slugs of which one must come first, or a state; form: how the file is written."""

    name: str
    expected: tuple[str, ...]
    form: str
    lines: tuple[str, ...]

    @property
    def bytes(self) -> bytes:
        """The log file; a failing one has a few lines of a run before it."""
        wrap = WRAPPED.get(self.form, "")
        lines = BEFORE * (self.form != "alone") + [wrap + line for line in self.lines]
        text = "\n".join(lines) + "\n"
        if self.form == "tqdm":  # a bar is written over itself, and what is printed next stands in the same line
            text = "".join(f"\rTraining Progress:  {n}%|#  | {n}/105 [00:0{n}<01:20]" for n in (1, 2, 3)) + text
        if self.form == "crlf":
            text = text.replace("\n", "\r\n")
        data = text.encode("utf-16" if self.form == "utf-16" else "utf-16-be" if self.form == "utf-16-be" else "utf-8")
        if self.form == "gzip":
            return gzip.compress(data)
        if self.form == "gzip-cut":
            return gzip.compress(data + bytes(1000))[:-12]
        return data


def excerpts(name: str) -> list[Excerpt]:
    found = []
    for block in (CORPUS / f"{name}.txt").read_text(encoding="utf-8").split("\n@@ ")[1:]:
        head, _, body = block.partition("\n")
        title, expected, form = (part.strip() for part in re.split(r" \| | \|$", head))
        found.append(Excerpt(title, tuple(expected.split("|")), form, tuple(body.rstrip("\n").split("\n"))))
    return found


def said(excerpt: Excerpt, directory: Path) -> str:
    """The slug that comes first, or the state when no cause is known."""
    path = directory / f"{excerpt.name}.log"
    path.write_bytes(excerpt.bytes)
    answer = logs.read_file(str(path))
    return answer.matches[0].signature.slug if answer.state == "known" else answer.state


def judged(name: str, directory: Path) -> dict[str, dict[str, str]]:
    """{right, unknown, wrong}: {name: what was said}; unknown is also unfinished: no cause, and nothing claimed."""
    table: dict[str, dict[str, str]] = {"right": {}, "unknown": {}, "wrong": {}}
    for excerpt in excerpts(name):
        answer = said(excerpt, directory)
        verdict = "right" if answer in excerpt.expected else "unknown" if answer == "unknown" else "wrong"
        table[verdict][excerpt.name] = answer
    return table
