"""Tables of hooks: releases in which they act, processes in which they act, the newest releases of the upstreams."""

from __future__ import annotations

import json

from bench.common import ROOT
from bench.common.gains import CHINESE, ENGLISH
from esgrpo import compat, engine
from esgrpo.algo.terms import Process
from esgrpo.tools import drift

NEWEST = ROOT / "ci" / "newest_releases.json"  # written by python -m ci.newest --record
COMPAT_HEAD = {ENGLISH: ["level", "versions", "hooks", "date", "`bash ci/matrix.sh`"],
               CHINESE: ["级别", "版本", "钩子", "日期", "`bash ci/matrix.sh`"]}
COMPAT_GPU = {ENGLISH: "needs GPUs: compat.toml says how", CHINESE: "需要 GPU：做法见 compat.toml"}
# where each kind of process is, in verl 0.9.1
PLACES = {
    Process.DRIVER: "the process that was started: `run_ppo`, before Ray",
    Process.TASK_RUNNER: "Ray actor `FullyAsyncTaskRunner`; on 0.7.0 the recipe's",
    Process.V1_TASK_RUNNER: "Ray actor of `main_ppo` under the v1 trainers: trainer and buffer of prompts in one",
    Process.ROLLOUTER: "Ray actor `FullyAsyncRollouter`: feeds prompts, bounds staleness",
    Process.TRAINER: "Ray actor `FullyAsyncTrainer`: advantages, steps, weight syncs",
    Process.ACTOR_WORKER: "Ray actors of the training engine: the loss, sends weights",
    Process.ROLLOUT_WORKER: "Ray actors that receive the weights for a replica",
    Process.AGENT_LOOP_WORKER: "Ray actors `AgentLoopWorker`: see all members of a group, submit requests",
    Process.REWARD_LOOP_WORKER: "Ray actors that compute rewards",
    Process.VLLM_SERVER: "Ray actors `vLLMHttpServer`: vLLM's front end of a replica",
    Process.ENGINE_CORE: "interpreter that vLLM spawns: scheduler, KV cache; .pth files and the environment reach it",
}


def compatibility_rows(language: str) -> list[list[str]]:
    """One row a tested tuple, best level first: level, versions, hooks, date, the command that shows it again."""
    rows = sorted(compat.load(), key=lambda row: compat.LEVELS.index(row.level))
    return [[row.level, ", ".join(f"{name} {version}" for name, version in row.versions.items()), hooks_of(row),
             row.date, COMPAT_GPU[language] if row.level == "gpu-e2e" else f"`--only {row.cell}`"]
            for row in rows]


def hooks_of(row: compat.Tested) -> str:
    """ "63 of 63" hooks of the upstream that a contract is about; other levels show more than their source."""
    about = next((name for name in ("vllm", "verl") if name in row.versions), None)
    if row.level != "contract" or about is None or "vllm-ascend" in row.versions:  # there the classes are driven alone
        return ""
    return "{} of {}".format(*drift.acting(about, row.versions[about]))


def process_rows() -> list[list[str]]:
    """overlay/README.md: kind of process, where it is, the hooks that act there."""
    hooks = [record.hook for record in engine.load_hooks().values()]
    rows = [["process", "where", "hooks"]]
    for process, place in PLACES.items():
        slugs = sorted(hook.slug for hook in hooks if process in hook.process)
        rows.append([f"`{process}`", place, f"{len(slugs)}: {', '.join(slugs)}"])
    return rows


def newest_rows(language: str) -> list[list[str]]:
    """The newest releases on the day of the record: what holds, and what does not."""
    record = json.loads(NEWEST.read_text(encoding="utf-8"))
    chinese = language == CHINESE
    yes, no = ("有", "没有") if chinese else ("yes", "no")
    head = [f"{record['date']} 的最新版本", "compat.toml 里", "结果", "不成立的"] if chinese else [
        f"newest on {record['date']}", "in compat.toml", "result", "does not hold"]
    return [head, *([f"{one['upstream']} {one['version']}", yes if one["tested"] else no, one["says"],
                     "; ".join(one["lost"]).replace("|", "/")] for one in record["releases"])]
