"""Answers from metrics.toml, and what the values of a log say about each other."""

from __future__ import annotations

import difflib
import json
import re
import statistics
import sys
from pathlib import Path

from esgrpo.errors import EsgrpoError, show

FILE = Path(__file__).with_name("metrics.toml")
PREFIX = "fully_async/"  # the trainer puts it in front of the rollouter's statistics
LATEST = 10  # values that a verdict rests on
APART = 0.1  # idle ratios that differ by less are equal
SLOTS_A_REPLICA = 16  # verl's default concurrency
_NUMBER = r"(?:np\.\w+\()?(-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|nan|inf))"
_PRINTED = re.compile(rf"'([a-z_]+(?:/[\w.-]+)+)': {_NUMBER}")  # a dict printed by the rollouter
_LOGGED = re.compile(rf"(?:^|\s)([A-Za-z_]\w*(?:/[\w.@-]+)+):{_NUMBER}")  # step:3 - actor/entropy:0.1 - ...
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def load() -> dict[str, dict]:
    """Entries by their pattern."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def expand(pattern: str) -> list[str]:
    """All names of `a/{b,c}`."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    options, _, tail = rest.partition("}")
    return [head + option + end for option in options.split(",") for end in expand(tail)]


def find(name: str, entries: dict[str, dict] | None = None) -> str | None:
    """The pattern that explains exactly this metric."""
    for pattern in entries or load():
        for known in expand(pattern):
            shape = re.escape(known).replace("<rule>", r"[\w-]+")
            if re.fullmatch(rf"(?:{PREFIX})?{shape.removeprefix(re.escape(PREFIX))}"
                            if not known.startswith("esgrpo/") else shape, name):
                return pattern
    return None


def chosen(wanted: str) -> list[str]:
    """Patterns for a name, a part of one, or all. Raises EsgrpoError with the nearest name."""
    entries = load()
    if wanted == "all":
        return list(entries)
    exact = find(wanted, entries)
    parts = [pattern for pattern in entries if any(wanted in name for name in expand(pattern))]
    if exact or parts:
        return [exact] if exact else parts
    names = [name for pattern in entries for name in expand(pattern)]
    near = difflib.get_close_matches(wanted, names, 1, cutoff=0.0)
    raise EsgrpoError("explain", f"no metric {wanted}", "a metric of verl's fully-async trainer or of esgrpo",
                      "nothing to explain", f"did you mean {near[0]}?")


def read(text: str) -> dict[str, list[float]]:
    """Every value of every metric in a console or JSONL log, in order.

    fully_async/ is taken off the statistics, but for counts: the trainer's are averages of several moments.
    """
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        line = _COLOUR.sub("", line)
        if line.startswith("{") and '"data"' in line:
            try:
                pairs = list(json.loads(line)["data"].items())
            except (ValueError, KeyError, AttributeError):
                continue
        else:
            pairs = _PRINTED.findall(line) or _LOGGED.findall(line)
        for name, value in pairs:
            if isinstance(value, (int, float, str)):
                short = re.sub(rf"^{PREFIX}(?=static/|monitor/)", "", name)
                values.setdefault(short, []).append(float(value))
    return values


def arithmetic(values: dict[str, float]) -> list[tuple[bool, str]]:
    """(holds, sentence) for every relation that the values must satisfy."""
    def has(*names: str) -> bool:
        return all(name in values for name in names)

    found = []
    if has("static/required_samples", "static/staleness_threshold", "static/max_required_samples"):
        required, staleness, most = (values[f"static/{n}"] for n in (
            "required_samples", "staleness_threshold", "max_required_samples"))
        steps = max(1, round(most / (required * (1 + staleness)))) if required else 1
        right = int(required * (staleness + 1) * steps) == int(most)
        found.append((right, f"max_required_samples: {most:g} {'=' if right else 'is not'} int({required:g} x "
                      f"{1 + staleness:g} x {steps}) (required_samples x (1 + staleness_threshold) x "
                      "trigger_parameter_sync_step)"))
    if has("static/max_queue_size", "static/max_required_samples"):
        room, most = values["static/max_queue_size"], values["static/max_required_samples"]
        right = room == most
        found.append((right, f"max_queue_size: {room:g} {'=' if right else 'is not'} max_required_samples"))
    if has("static/max_concurrent_samples", "static/max_required_samples"):
        slots, most = values["static/max_concurrent_samples"], values["static/max_required_samples"]
        whole = slots % SLOTS_A_REPLICA == 0 and slots > 0
        said = (f"= {SLOTS_A_REPLICA} x {slots / SLOTS_A_REPLICA:g} replicas" if whole
                else "= max_required_samples" if slots == most else "is a concurrency of its own")
        found.append((slots <= most, f"max_concurrent_samples: {slots:g} {said}"))
    for small, large in (("monitor/active_tasks_size", "static/max_concurrent_samples"),
                         ("monitor/queue/mq_queue_size", "static/max_queue_size")):
        if has(small, large):
            right = values[small] <= values[large]
            found.append((right, f"{small}: {values[small]:g} {'<=' if right else 'is above'} {large} "
                          f"{values[large]:g}"))
    count = {name: values.get(f"count/{name}") for name in (
        "staleness_samples", "total_generated_samples", "dropped_stale_samples", "current_param_version")}
    if None not in count.values() and has("monitor/active_tasks_size") and count["current_param_version"] == 0:
        running = values["monitor/active_tasks_size"]
        waiting = (count["staleness_samples"] - count["total_generated_samples"] - count["dropped_stale_samples"]
                   - running)
        found.append((waiting in (0, 1), f"staleness_samples: {count['staleness_samples']:g} = "
                      f"{count['total_generated_samples']:g} generated + {count['dropped_stale_samples']:g} dropped + "
                      f"{running:g} running + {waiting:g} that waits for a slot"))
    parts = [values[name] for name in values if name.startswith("esgrpo/bubble/")]
    if parts and has("esgrpo/bubble_rate"):
        right = abs(sum(parts) - values["esgrpo/bubble_rate"]) < 1e-6
        found.append((right, f"esgrpo/bubble_rate: {values['esgrpo/bubble_rate']:.4g} "
                      f"{'=' if right else 'is not'} the sum of its causes {sum(parts):.4g}"))
    return found


def bottleneck(values: dict[str, list[float]]) -> str:
    """Which side the other one waits for, and by what."""
    def middle(name: str) -> float | None:
        return statistics.median(values[name][-LATEST:]) if name in values else None

    trainer, rollouter = middle("fully_async/trainer/idle_ratio"), middle("fully_async/rollouter/idle_ratio")
    if trainer is not None and rollouter is not None:
        waits = f"the trainer waits {trainer:.0%} of its time, rollout is paused {rollouter:.0%}"
        if trainer > rollouter + APART:
            return f"rollout is the bottleneck: {waits}"
        if rollouter > trainer + APART:
            return f"the trainer is the bottleneck: {waits}"
        return f"neither side is the bottleneck: {waits}"
    queued, required = middle("monitor/queue/mq_queue_size"), middle("static/required_samples")
    active, slots = middle("monitor/active_tasks_size"), middle("static/max_concurrent_samples")
    stale, most = middle("count/staleness_samples"), middle("static/max_required_samples")
    if None in (queued, required, active, slots):
        return "cannot be told: the log has neither idle ratios nor the rollouter's statistics"
    if queued >= required or (None not in (stale, most) and stale >= most):
        return (f"the trainer is the bottleneck: {queued:g} finished prompts wait, one step takes {required:g}"
                + (", and rollout is paused by the staleness limit" if stale is not None and stale >= most else ""))
    if active >= slots:
        return (f"rollout is the bottleneck: all {slots:g} slots are busy and only {queued:g} of {required:g} prompts "
                "for the next step are finished")
    return (f"rollout is the bottleneck, and not for want of slots: {active:g} of {slots:g} are busy and only "
            f"{queued:g} of {required:g} prompts are finished (a tail, a weight sync, or no prompts)")


def _entry(pattern: str, entry: dict) -> str:
    lines = [pattern, f"  {entry['means']}", f"  formula: {entry['formula']}", f"  where:   {entry['where']}",
             f"  healthy: {entry['healthy']}", f"  change:  {entry['change']}"]
    return "\n".join(lines + ([f"  only in: verl {', '.join(entry['verl'])}"] if "verl" in entry else []))


def of_log(text: str, wanted: str = "all") -> list[str]:
    """Latest values with their meaning, then arithmetic, then the verdict."""
    values = read(text)
    entries = load()
    explained = {name: pattern for name in values if (pattern := find(name, entries))}
    if not explained:
        raise EsgrpoError("explain --log", "no metric in it", "verl's console log or metrics.jsonl",
                          "nothing to explain", "add console to trainer.logger and give its output")
    shown = {name: pattern for name, pattern in explained.items() if wanted == "all" or wanted in name}
    width = max(map(len, shown), default=0)
    lines = [f"{name.ljust(width)}  {values[name][-1]:g}  {entries[pattern]['means']}"
             for name, pattern in sorted(shown.items())]
    latest = {name: series[-1] for name, series in values.items()}
    lines += [f"{'ok' if holds else 'WRONG'}: {sentence}" for holds, sentence in arithmetic(latest)]
    return [*lines, f"verdict: {bottleneck(values)}"]


def main(arguments) -> int:
    """Exit code 0; 1 when values of a log contradict each other."""
    if arguments.log is None:
        entries = load()
        show("\n\n".join(_entry(pattern, entries[pattern]) for pattern in chosen(arguments.metric)))
        return 0
    try:
        text = sys.stdin.read() if arguments.log == "-" else Path(arguments.log).read_text(errors="replace")
    except OSError as error:
        raise EsgrpoError("explain --log", f"{arguments.log}: {error.strerror}", "a log", "nothing was read",
                          "correct the path") from None
    lines = of_log(text, arguments.metric)
    show("\n".join(lines))
    return 1 if any(line.startswith("WRONG") for line in lines) else 0
