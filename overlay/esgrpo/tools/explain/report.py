"""Answers from metrics.toml, and what the values of a log say about each other."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import statistics
from pathlib import Path

from esgrpo import compat
from esgrpo.errors import EsgrpoError, show
from esgrpo.tools import language, log_source

FILES = tuple(Path(__file__).with_name(name) for name in ("metrics.toml", "verl.toml"))
TEXTS, SYNONYMS = (Path(__file__).with_name(name) for name in ("texts.toml", "synonyms.toml"))
said = functools.partial(language.texts, TEXTS)
PREFIX = "fully_async/"  # the trainer puts it in front of the rollouter's statistics
SUGGESTED = 3  # metrics that an unknown name is answered with
STEM = 6  # letters that words are compared by: waiting and waits differ behind them
NAMED, ALIKE, SPELT = 2.0, 0.7, 0.5  # what a word in the name counts against one in the text, a synonym, spelling
SIMILAR, MISSPELT = 0.88, 3.0  # difflib ratio from which a name is only misspelt, and what that counts
UNTOLD = frozenset(("the", "too", "why", "how", "does", "do", "is", "are", "of", "to", "what", "my", "for", "in", "and",
                    "it", "so", "at", "by", "be", "on", "always"))  # words of a question that tell nothing
LATEST = 10  # values that a verdict rests on
APART = 0.1  # idle ratios that differ by less are equal
BOTH = 0.2  # of their time, from which two sides that both idle wait for each other
WORTH_A_FILTER = 0.2  # of the trained response tokens, in groups without a gradient
SLOTS_A_REPLICA = 16  # verl's default of async_training.concurrent_samples_per_replica, all there is before 0.9.1
V1 = "training/off_policy/trajectory_staleness/mean"  # a metric that only v1 trainers have
V1_WAITS = ("timing_s/gen", "timing_s/switch_wait")  # of a step, the trainer for samples
IDLE = ("esgrpo/bubble/paused", "esgrpo/bubble/starved")  # of a replica, with nothing that it may run
_NUMBER = r"(?:np\.\w+\()?(-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|nan|inf))(?!\.?\w)"  # no version, no address
_PRINTED = re.compile(rf"'([a-z_]+(?:/[\w.-]+)+)': {_NUMBER}")  # a dict printed by the rollouter
_LOGGED = re.compile(rf"(?:^|\s)([A-Za-z_]\w*(?:/[\w.@-]+)+):{_NUMBER}")  # step:3 - actor/entropy:0.1 - ...
_SLOTS = re.compile(r"\bconcurrent_samples_per_replica\b['\"]?[:=]\s*([1-9]\d*)")  # as verl prints it
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@functools.cache
def load() -> dict[str, dict]:
    """Entries by their pattern; where two fit a name, the first."""
    return {pattern: entry for file in FILES for pattern, entry in compat.toml(file).items()}


def expand(pattern: str) -> list[str]:
    """All names of `a/{b,c}`."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    options, _, tail = rest.partition("}")
    return [head + option + end for option in options.split(",") for end in expand(tail)]


@functools.cache
def _shape(known: str) -> re.Pattern:
    """A name with <rule> for one part, <path> for any, as an expression."""
    shape = re.escape(known).replace("<rule>", r"[\w-]+").replace("<path>", r"\S+")
    ours = known.startswith("esgrpo/")
    return re.compile(shape if ours else rf"(?:{PREFIX})?{shape.removeprefix(re.escape(PREFIX))}")


def find(name: str, entries: dict[str, dict] | None = None) -> str | None:
    """The pattern that explains exactly this metric."""
    for pattern in entries or load():
        if any(_shape(known).fullmatch(name) for known in expand(pattern)):
            return pattern
    return None


def chosen(wanted: str) -> list[str]:
    """Patterns for a name, a part of one, or all. Raises EsgrpoError with those that mean something like it."""
    entries = load()
    if wanted == "all":
        return list(entries)
    exact = find(wanted, entries)
    parts = [pattern for pattern in entries if wanted and any(wanted in name for name in expand(pattern))]
    if exact or parts:
        return [exact] if exact else parts
    near = "; ".join(f"{name} ({language.of(entries[pattern], 'means')})" for name, pattern in similar(wanted))
    raise EsgrpoError("explain", said("unknown", name=wanted), said("wanted"), said("nothing"),
                      said("did_you_mean", names=near))


def _words(text: str) -> set[str]:
    """Words of a name or a sentence without their endings, and pairs of Chinese characters."""
    plain = {word if len(word) < STEM else word[:STEM] for word in re.findall(r"[a-z]{2,}|\d+", text.lower())}
    return plain | {run[i:i + 2] for run in re.findall(r"[\u4e00-\u9fff]+", text) for i in range(len(run) - 1)}


@functools.cache
def _meanings() -> dict[str, tuple[set[str], set[str]]]:
    """(words of the names, words of what it means in both languages) by pattern."""
    return {pattern: (_words(" ".join(expand(pattern))), _words(f"{entry['means']} {entry['means_zh']}"))
            for pattern, entry in load().items()}


def similar(wanted: str) -> list[tuple[str, str]]:
    """(name, pattern) of the metrics that mean something like `wanted`, best first: by its words and their synonyms,
    rare ones above common ones; spelling decides where meaning does not."""
    families = [set().union(*map(_words, family)) for family in compat.toml(SYNONYMS)["families"]]
    asked = _words(wanted) - UNTOLD
    alike = {word: set().union(*(family for family in families if word in family)) - {word} for word in asked}
    meanings = _meanings()

    def weight(word: str) -> float:
        return 1 / (1 + sum(word in names | said for names, said in meanings.values())) ** 0.5

    def points(word: str, names: set[str], said: set[str]) -> float:
        return weight(word) * (NAMED * (word in names) + (word in said))

    def score(pattern: str) -> tuple[float, str]:
        names, said = meanings[pattern]
        total = sum(max(points(word, names, said), *(ALIKE * points(other, names, said) for other in alike[word]), 0)
                    for word in asked)
        spelt = {name: max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in {
            name, name.rpartition("/")[2]}) for name in expand(pattern)}
        total += MISSPELT * (max(spelt.values()) >= SIMILAR)
        told = asked.union(*alike.values())
        name = max(spelt, key=lambda name: (len(_words(name) & told), spelt[name]))
        return total + SPELT * max(spelt.values()), name

    ranked = sorted(((*score(pattern), pattern) for pattern in meanings), reverse=True)
    return [(name, pattern) for _, name, pattern in ranked[:SUGGESTED]]


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
            if isinstance(value, (int, float, str)) and (number := _number(value)) is not None:
                short = re.sub(rf"^{PREFIX}(?=static/|monitor/)", "", name)
                values.setdefault(short, []).append(number)
    return values


def _number(value: float | str) -> float | None:
    try:
        return float(value)
    except ValueError:  # a text among the metrics of a JSONL log
        return None


def arithmetic(values: dict[str, float], each: int = SLOTS_A_REPLICA) -> list[tuple[bool, str]]:
    """(holds, sentence) for every relation that the values must satisfy; NaN and infinity satisfy none.

    each: prompts at once that a replica has.
    """
    values = {name: value for name, value in values.items() if math.isfinite(value)}

    def has(*names: str) -> bool:
        return all(name in values for name in names)

    def equal(right: bool) -> str:
        return said("is" if right else "is_not")

    found = []
    if has("static/required_samples", "static/staleness_threshold", "static/max_required_samples"):
        required, staleness, most = (values[f"static/{n}"] for n in (
            "required_samples", "staleness_threshold", "max_required_samples"))
        one = required * (1 + staleness)  # between two weight syncs
        steps = max(1, round(most / one)) if one and math.isfinite(most / one) else 1
        right = math.isfinite(one * steps) and int(one * steps) == int(most)
        found.append((right, said("required", most=most, relation=equal(right), required=required,
                                  share=1 + staleness, steps=steps)))
    if has("static/max_queue_size", "static/max_required_samples"):
        room = values["static/max_queue_size"]
        right = room == values["static/max_required_samples"]
        found.append((right, said("room", room=room, relation=equal(right))))
    if has("static/max_concurrent_samples", "static/max_required_samples"):
        slots, most = values["static/max_concurrent_samples"], values["static/max_required_samples"]
        whole = slots % each == 0 and slots > 0
        of = (said("of_replicas", each=each, replicas=slots / each) if whole
              else said("of_limit" if slots == most else "of_its_own"))
        found.append((slots <= most, said("slots", slots=slots, said=of)))
    for small, large in (("monitor/active_tasks_size", "static/max_concurrent_samples"),
                         ("monitor/queue/mq_queue_size", "static/max_queue_size")):
        if has(small, large):
            right = values[small] <= values[large]
            found.append((right, said("bound", small=small, value=values[small], large=large, limit=values[large],
                                      relation=said("within" if right else "above"))))
    count = {name: values.get(f"count/{name}") for name in (
        "staleness_samples", "total_generated_samples", "dropped_stale_samples", "current_param_version")}
    if None not in count.values() and has("monitor/active_tasks_size") and count["current_param_version"] == 0:
        stale, generated, dropped = list(count.values())[:3]
        running = values["monitor/active_tasks_size"]
        waiting = stale - generated - dropped - running
        found.append((waiting in (0, 1), said("started", stale=stale, generated=generated, dropped=dropped,
                                              running=running, waiting=waiting)))
    parts = [values[name] for name in values if name.startswith("esgrpo/bubble/")]
    if parts and has("esgrpo/bubble_rate"):
        rate = values["esgrpo/bubble_rate"]
        right = abs(sum(parts) - rate) < 1e-6
        found.append((right, said("bubbles", rate=rate, relation=equal(right), total=sum(parts))))
    return found


def bottleneck(values: dict[str, list[float]]) -> str:
    """Which side the other one waits for, and by what; of a trainer that trains groups without a gradient, the cure."""
    finite = {name: [value for value in series if math.isfinite(value)] for name, series in values.items()}
    values = {name: series for name, series in finite.items() if series}
    verdict, fields = _judged(values)
    share = _without_gradient(values) if verdict == "trainer_slow" else 0.0
    cure = "" if share < WORTH_A_FILTER else said("no_gradient", share=share, cure=said(
        "filter_v1" if V1 in values else "filter_fully_async"))
    return said(verdict, **fields) + cure


def _without_gradient(values: dict[str, list[float]]) -> float:
    """Share of the trained response tokens that are of groups without a gradient; 0 where the log does not say."""
    names = ("esgrpo/waste/zero_variance", "perf/total_num_tokens", "response_length/mean", "prompt_length/mean")
    if any(name not in values for name in names):
        return 0.0
    null, tokens, response, prompt = (statistics.mean(values[name][-LATEST:]) for name in names)
    trained = tokens * response / (response + prompt) if response + prompt > 0 else 0.0
    return null / trained if trained > 0 else 0.0


def _judged(values: dict[str, list[float]]) -> tuple[str, dict]:
    """(name of the verdict, what its text says)."""
    def middle(name: str) -> float | None:
        return statistics.median(values[name][-LATEST:]) if name in values else None

    trainer, rollouter = middle("fully_async/trainer/idle_ratio"), middle("fully_async/rollouter/idle_ratio")
    queued, required = middle("monitor/queue/mq_queue_size"), middle("static/required_samples")
    if trainer is not None and rollouter is not None:
        waits, slower = said("waits", trainer=trainer, rollouter=rollouter), _slower(trainer, rollouter)
        if slower == "neither" and None not in (queued, required) and queued >= required > 0:
            # null_groups keeps rollout busy with groups that are left out
            return "trainer_slow", {"waits": f"{waits}; {said('finished_wait', queued=queued, required=required)}"}
        return slower, {"waits": waits, "more": said("more_staleness")}
    if V1 in values and any(values.get("timing_s/step", ())[-LATEST:]):
        return _of_v1(values)
    active, slots = middle("monitor/active_tasks_size"), middle("static/max_concurrent_samples")
    stale, most = middle("count/staleness_samples"), middle("static/max_required_samples")
    if None in (queued, required, active, slots):
        return "cannot_tell", {}
    paused = None not in (stale, most) and stale >= most
    if queued >= required or paused:
        return "trainer_slow", {"waits": said("paused_too" if paused else "finished_wait", queued=queued,
                                              required=required)}
    if active >= slots:
        return "rollout_slow", {"waits": said("slots_busy", slots=slots, queued=queued, required=required)}
    return "slots_free", {"active": active, "slots": slots, "queued": queued, "required": required}


def _of_v1(values: dict[str, list[float]]) -> tuple[str, dict]:
    """The same of a v1 trainer, which waits in some steps and not in others; of rollout the overlay knows."""
    def latest(*names: str) -> float:
        return sum(sum(values.get(name, ())[-LATEST:]) for name in names)

    trainer = latest(*V1_WAITS) / latest("timing_s/step")
    if not any(name in values for name in IDLE):
        return "rollout_slow" if trainer > APART else "trainer_slow", {"waits": said("v1_waits", trainer=trainer)}
    idle = latest(*IDLE) / max(len(values.get(name, ())[-LATEST:]) for name in IDLE)
    return _slower(trainer, idle), {"waits": said("v1_both", trainer=trainer, idle=idle), "more": said("more_warmup")}


def _slower(trainer: float, rollout: float) -> str:
    """The name of the verdict on two shares of time in which a side waits."""
    if min(trainer, rollout) >= BOTH:
        return "both_wait"
    return ("rollout_slow" if trainer > rollout + APART else
            "trainer_slow" if rollout > trainer + APART else "neither")


def _entry(pattern: str, entry: dict) -> str:
    lines = [pattern, f"  {language.of(entry, 'means')}"]
    for key in ("formula", "where", "healthy", "change"):
        # a formula of symbols alone and a place in the source have one text
        lines.append(f"  {said(key)}{language.of(entry, key) if f'{key}_zh' in entry else entry[key]}")
    return "\n".join(lines + ([f"  {said('only_in', releases=', '.join(entry['verl']))}"] if "verl" in entry else []))


def _latest(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: series[-1] for name, series in values.items()}


def of_log(text: str, wanted: str = "all") -> tuple[list[str], bool]:
    """(latest values with their meaning, then arithmetic, then the verdict; no values contradict each other)."""
    values = read(text)
    entries = load()
    explained = {name: pattern for name in values if (pattern := find(name, entries))}
    if not explained:
        raise EsgrpoError("explain --log", said("no_metric"), said("a_log"), said("nothing"), said("add_console"))
    shown = {name: pattern for name, pattern in explained.items()
             if wanted == "all" or wanted in name or wanted == f"{PREFIX}{name}"}
    if not shown and chosen(wanted):
        raise EsgrpoError("explain --log", said("not_in_log", name=wanted), said("a_log"), said("nothing"),
                          said("leave_out"))
    width = max(map(len, shown))
    lines = [f"{name.ljust(width)}  {values[name][-1]:g}  {language.of(entries[pattern], 'means')}"
             for name, pattern in sorted(shown.items())]
    told = _SLOTS.search(text)
    relations = arithmetic(_latest(values), int(told[1]) if told else SLOTS_A_REPLICA)
    lines += [f"{said('ok' if holds else 'wrong')}: {sentence}" for holds, sentence in relations]
    return [*lines, said("verdict", verdict=bottleneck(values))], all(holds for holds, _ in relations)


def main(arguments) -> int:
    """Exit code 0; 1 when values of a log contradict each other."""
    if arguments.log is None:
        entries = load()
        show("\n\n".join(_entry(pattern, entries[pattern]) for pattern in chosen(arguments.metric)))
        return 0
    with log_source.opened(arguments.log, "explain --log") as raw:
        try:
            text = "".join(log_source.Source(raw))
        except log_source.Unreadable as error:
            raise EsgrpoError("explain --log", f"{arguments.log}: {error}", said("a_log"), said("nothing"),
                              said("unpack")) from None
    lines, holds = of_log(text, arguments.metric)
    show("\n".join(lines))
    return 0 if holds else 1
