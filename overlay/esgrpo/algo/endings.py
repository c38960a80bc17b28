"""What died, in words a user knows, from what Ray and vLLM leave behind: the text of an exception. Pure.

Ray gives a dead actor as a block of lines (class_name, actor_id, pid, name, ip) and an error in a living one as a chain
of tracebacks whose innermost says `ray::Class.method() (pid=.., ip=..`; a nested RayTaskError keeps both as text only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ERROR_CHARACTERS = 300

# Ray class -> what it is here; any other class keeps its own name.
WORDS = {
    "FullyAsyncTaskRunner": "task runner", "TaskRunnerV1": "task runner and trainer",
    "FullyAsyncRollouter": "rollouter", "FullyAsyncTrainer": "trainer", "MessageQueue": "message queue",
    "AgentLoopWorker": "agent-loop worker", "AgentLoopWorkerTQ": "agent-loop worker",
    "RewardLoopWorker": "reward-loop worker", "vLLMHttpServer": "vLLM server", "WorkerDict": "actor worker",
    "ActorRolloutRefWorker": "actor worker", "DetachActorWorker": "actor worker",
    "CheckpointEngineWorker": "rollout worker", "GlobalRequestLoadBalancer": "load balancer",
}
ENGINE_DEAD = "EngineDeadError"  # vLLM's server lives and says that its engine process does not
NODE_GONE = re.compile(r"node .{0,80}(?:died|was terminated|has been marked dead)|raylet died", re.I)

DISK = re.compile(r"No space left on device|PytorchStreamWriter failed writing|Read-only file system")
DISK_WORDS = "the disk is full or cannot be written"

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BLOCK = re.compile(r"class_name: (?P<kind>\S+)(?P<rest>(?:\n[ \t]+\w+: [^\n]*)*)")
_FRAME = re.compile(r"ray::(?:(?P<kind>\w+)\.)?(?P<method>\w+)\(\) \(pid=(?P<pid>\d+), ip=(?P<ip>[^,)\s]+)")
_ERROR = re.compile(r"^(?:[\w.]+\.)?(?P<name>[A-Za-z_]\w*(?:\(\w+\))?): ?(?P<message>.*)$")
_SERVER = re.compile(r"_server_(?:decode_)?(?P<replica>\d+)_(?P<node>\d+)")


@dataclass(frozen=True)
class Ending:
    """What ended a run. `died`: the process is gone; otherwise it raised. Empty strings: not known."""

    process: str
    died: bool
    pid: str = ""
    node: str = ""
    name: str = ""  # of the Ray actor
    error: str = ""

    @property
    def replica(self) -> str:
        found = _SERVER.search(self.name)
        return found["replica"] if found else ""

    def __str__(self) -> str:
        place = [f"replica {self.replica}" if self.replica else "", f"node {self.node}" if self.node else "",
                 f"pid {self.pid}" if self.pid else "", self.name]
        where = ", ".join(part for part in place if part)
        what = f"{self.process}{f' ({where})' if where else ''}"
        if self.died:
            return f"the {what} died" + (f": {self.error}" if self.error else "")
        return f"{self.error} in the {what}"


def of_error(kind: str, text: str, names: Mapping[tuple[str, str], str] | None = None) -> Ending:
    """The ending that an exception of class `kind` with this text stands for.

    `names`: (node, pid) -> name of the actor, where the text gives a pid alone.
    """
    text = _COLOURS.sub("", text)
    names = names or {}
    last = _last_error(kind, text) + (f" ({DISK_WORDS})" if DISK.search(text) else "")
    block = list(_BLOCK.finditer(text))
    frames = list(_FRAME.finditer(text))
    if block:
        fields = dict(re.findall(r"^[ \t]+(\w+): (.*)$", block[-1]["rest"], re.M))
        return Ending(WORDS.get(block[-1]["kind"], block[-1]["kind"]), True, fields.get("pid", ""),
                      fields.get("ip", ""), fields.get("name", ""), _exit_detail(text))
    if not frames:
        return Ending("cluster node" if NODE_GONE.search(text) else "driver", bool(NODE_GONE.search(text)), error=last)
    inner = frames[-1]
    process = WORDS.get(inner["kind"] or "", inner["kind"] or inner["method"])
    name = names.get((inner["ip"], inner["pid"]), "")
    if ENGINE_DEAD in text:
        return Ending(f"engine (EngineCore) of the {process}", True, inner["pid"], inner["ip"], name)
    return Ending(process, False, inner["pid"], inner["ip"], name, last)


def _last_error(kind: str, text: str) -> str:
    """The innermost `Error: message`, which Python prints last; else the first line of the text."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        found = None if line[0].isspace() else _ERROR.match(line)
        if found:
            return f"{found['name']}: {found['message']}"[:ERROR_CHARACTERS]
    return f"{kind}: {lines[0].strip() if lines else 'without a message'}"[:ERROR_CHARACTERS]


def _exit_detail(text: str) -> str:
    """Ray's reason for a dead worker, its first sentence."""
    found = re.search(r"Worker exit detail: ([^\n]+)|(?:was killed by `?ray\.kill|OOM|out of memory)[^\n]*", text)
    if not found:
        return ""
    return (found[1] or found[0]).split(". ")[0].strip()[:ERROR_CHARACTERS]


def advice(checkpoint: str | None, folder: str, node: str, resume_mode: str, save_freq: int) -> str:
    """How to go on. `checkpoint`: the one that a restart would load, as seen from `node`; None: there is none."""
    if checkpoint is None:
        how = ("trainer.save_freq=N saves one each N weight versions" if save_freq <= 0
               else f"trainer.save_freq={save_freq} had not come round")
        return f"nothing to resume from: {folder} holds no checkpoint on {node}; {how}"
    if resume_mode == "auto":
        return f"resume: the same command goes on from {checkpoint}"
    return (f"resume: trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint} "
            f"(resume_mode is {resume_mode})")
