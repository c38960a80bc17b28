"""Arms of training benchmarks: the overrides that switch on each module alone, and all."""

from __future__ import annotations

SEGMENT = "+actor_rollout_ref.rollout.segment"
SEGMENT_LENGTH = 64  # tokens; responses of the testbed end between 20 and 512


def switches(*keys: str) -> list[str]:
    """Overrides of the group `segment`; a key without a value is switched on."""
    return [f"{SEGMENT}.{key if '=' in key else key + '=True'}" for key in keys]


HISTORY = "history.enable"
LOOPS = ("prune.repetition.enable",)


def arms(segment_length: int) -> dict[str, list[str]]:
    """Arm -> overrides; `segment_length` is in tokens."""
    length = f"segment_length={segment_length}"
    on = ("enable", length)
    return {
        "off": switches("observe"),
        "B yield": switches("profile=static", length),
        "A routing": switches(*on, HISTORY, "routing.enable"),
        "B soft": switches(*on),
        "C pruning": switches(*on, HISTORY, *LOOPS, "prune.resolved.enable", "prune.audit.enable"),
        "C loops": switches(*on, *LOOPS, "prune.audit.enable"),
        "C verdicts": switches(*on, *LOOPS, "prune.audit.enable", "prune.verdict.enable"),
        "C sampler": switches(*on, HISTORY, "sampler.enable"),
        "keep": switches(*on, "sync.requests=keep"),
        "token outputs": switches("observe", "token_outputs"),
        "all": switches("profile=elastic", length),  # what ships
        # effective tokens reward what the sampler selects: the same without it stands beside
        "all without sampler": switches("profile=elastic", length, "sampler.enable=False"),
    }


# Arm -> what takes one module out of `all`. Keeping requests at a sync is what segments do by themselves: `history` and
# `prune` act at their boundaries, so segments alone cannot be taken out.
LEFT_OUT = {
    "all without routing": ("routing.enable=False",),
    "all without keep": ("sync.requests=abort",),
    "all without loops": ("prune.repetition.enable=False",),
    "all without verdicts": ("prune.verdict.enable=False",),
    "all without token outputs": ("token_outputs=False",),
    "all without filter": ("null_groups=train",),
    "all without headroom": ("kv_headroom=0",),
}


def with_left_out(segment_length: int) -> dict[str, list[str]]:
    """`arms`, `all` without one module each, and with what no profile has."""
    found = arms(segment_length)
    for name, mode in (("spare", "spare"), ("filter", "replace")):
        found[f"C {name}"] = switches("enable", f"segment_length={segment_length}", f"null_groups={mode}")
    found["all filter"] = found["all"] + switches("null_groups=replace")
    found["all resolved"] = found["all"] + switches("prune.resolved.enable")
    # a benchmark sets the staleness by hand, which only a run that says so leaves to the controller
    found["all overlap"] = found["all"] + switches("overlap.enable", "overlap.override")
    for name, off in LEFT_OUT.items():
        keys = {line.partition("=")[0] for line in switches(*off)}
        found[name] = [line for line in found["all"] if line.partition("=")[0] not in keys] + switches(*off)
    return found


ARMS = arms(SEGMENT_LENGTH)
