"""The config group `actor_rollout_ref.rollout.segment`: frozen dataclasses, defaults, validation.

The driver validates once and hands the result to every other process in the environment (ESGRPO_SEGMENT), because
vLLM's EngineCore is a spawned interpreter that sees neither Hydra nor Ray.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from esgrpo.errors import ConfigError

PREFIX = "actor_rollout_ref.rollout.segment"
ENV_SEGMENT = "ESGRPO_SEGMENT"
ENV_FEATURES = "ESGRPO_FEATURES"
ENV_FACTS = "ESGRPO_FACTS"


def _number(default, low, high, doc, open_low=False):
    """A numeric field with its inclusive range; None stands for no bound, open_low excludes `low` itself."""
    return field(default=default, metadata={"low": low, "high": high, "doc": doc, "open_low": open_low})


def _choice(default, options, doc):
    return field(default=default, metadata={"options": options, "doc": doc})


def _flag(default, doc):
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Repetition:
    """Rule of vLLM's RepetitionDetectionParams, looked at every `check_interval` tokens instead of at every token."""

    enable: bool = _flag(False, "prune a response whose tail repeats one pattern")
    max_pattern_size: int = _number(32, 1, 1024, "longest repeated pattern, tokens")
    min_pattern_size: int = _number(1, 1, 1024, "shortest repeated pattern, tokens")
    min_count: int = _number(8, 2, 1024, "how often the pattern must stand at the tail")
    check_interval: int = _number(32, 1, None, "tokens between two looks at a response")
    keep_row: bool = _flag(
        False, "train the shortened response with its reward instead of masking it: a proven failure to unlearn"
    )


@dataclass(frozen=True)
class Prune:
    repetition: Repetition = field(default_factory=Repetition)
    finish_group_after: int = _number(
        0, 0, None, "finish the stragglers of a group once this many members are done; 0 never does"
    )


@dataclass(frozen=True)
class Pois:
    anchor: str = _choice("token", ("token", "version"), "which policy is the denominator of the ratio")


@dataclass(frozen=True)
class Dmmpt:
    enable: bool = _flag(False, "mask well-mastered positive tokens (UloRL, eq. 10)")
    tau: float = _number(0.99, 0.0, 1.0, "a positive token with probability >= tau is mastered")
    sigma: float = _number(0.2, 0.0, None, "mask only in responses with mean entropy below sigma, nats")


@dataclass(frozen=True)
class Segment:
    """Everything under `segment`. With enable=False and observe=False no hook is on the path."""

    enable: bool = _flag(False, "segment rollout")
    observe: bool = _flag(False, "measure and record, decide nothing (the baseline arm of a comparison)")
    segment_length: int = _number(1024, 2, None, "tokens between two boundaries of a response")
    boundary: str = _choice("soft", ("soft", "yield"), "what a boundary does: evaluate only, or hand the response back")
    capacity: int = _number(0, 0, None, "requests at which a replica is full, for bubble_rate; 0: max_num_seqs")
    success_threshold: float = _number(
        0.5, None, None, "a sample is correct from this score (or numeric acc) on; a boolean acc decides alone"
    )
    prune: Prune = field(default_factory=Prune)
    pois: Pois = field(default_factory=Pois)
    dmmpt: Dmmpt = field(default_factory=Dmmpt)

    @property
    def prunes(self) -> bool:
        return self.enable and (self.prune.repetition.enable or self.prune.finish_group_after > 0)


def _range_text(spec, kind: str) -> str:
    low, high = spec["low"], spec["high"]
    number, bracket = "an integer" if kind == "int" else "a number", "(" if spec.get("open_low") else "["
    return f"{number} in {bracket}{'-inf' if low is None else low}, {'inf' if high is None else high}]"


def _check_value(path: str, spec, kind: str, value):
    """One leaf: type, choice and range. Booleans are not numbers; 1.0 is not an int."""
    def fail(wanted):
        raise ConfigError(path, f"{value!r}", wanted, "the run does not start", f"set {path} to {wanted}")

    if kind == "bool":
        if not isinstance(value, bool):
            fail("true or false")
        return value
    if "options" in spec:
        if value not in spec["options"]:
            close = difflib.get_close_matches(str(value), spec["options"], 1)
            fail("one of " + ", ".join(spec["options"]) + (f" (did you mean {close[0]}?)" if close else ""))
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (kind == "int" and not isinstance(value, int)):
        fail(_range_text(spec, kind))
    low, high = spec["low"], spec["high"]
    outside = (low is not None and value < low) or (high is not None and value > high) or value != value
    if outside or (spec.get("open_low") and value == low):
        fail(_range_text(spec, kind))
    return float(value) if kind == "float" else value


def _build(cls, values, path: str):
    if not isinstance(values, Mapping):
        raise ConfigError(path, f"{values!r}", "a mapping", "the run does not start", f"use +{path}.<key>=<value>")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, 1, cutoff=0.0)
            raise ConfigError(f"{path}.{key}", f"unknown key with value {value!r}", f"one of {', '.join(fields)}",
                              "the run does not start", f"did you mean {path}.{close[0]}?")
        spec = fields[key]
        nested = spec.default_factory is not dataclasses.MISSING
        arguments[key] = (_build(spec.default_factory, value, f"{path}.{key}") if nested
                          else _check_value(f"{path}.{key}", spec.metadata, spec.type, value))
    return cls(**arguments)


def parse(values: Mapping | None, response_length: int | None = None) -> Segment:
    """Validated `Segment` from a plain mapping.

    Raises ConfigError (one line: key, value, allowed range, closest valid key) for unknown or impossible values.
    `response_length` is the response budget in tokens.
    """
    segment = _build(Segment, {} if values is None else values, PREFIX)
    if response_length is not None and segment.enable and segment.segment_length > response_length:
        raise ConfigError(f"{PREFIX}.segment_length", str(segment.segment_length),
                          f"an integer in [2, {response_length}] (data.max_response_length)",
                          "no boundary would ever be reached, the run does not start",
                          "lower segment_length or drop segment.enable")
    repetition = segment.prune.repetition
    if repetition.min_pattern_size > repetition.max_pattern_size:
        raise ConfigError(f"{PREFIX}.prune.repetition.min_pattern_size", str(repetition.min_pattern_size),
                          f"at most max_pattern_size = {repetition.max_pattern_size}", "the run does not start",
                          "swap the two")
    return segment


def features(segment: Segment, loss_mode: str) -> frozenset[str]:
    """Names that hooks are switched on by."""
    names = set()
    if segment.enable or segment.observe:
        names.add("observe")
    if segment.enable:
        names.add("segment")
    if segment.prunes:
        names.add("prune")
    if segment.enable and segment.boundary == "yield":
        names.add("yield")
    if segment.dmmpt.enable:
        names.add("dmmpt")
    if loss_mode in ("pois", "sais"):
        names.add(loss_mode)
    return frozenset(names)


@functools.lru_cache(maxsize=4)
def _from_json(text: str) -> Segment:
    return parse(json.loads(text))


def current() -> Segment:
    """The settings of this run, in any process; defaults when the driver has set none."""
    return _from_json(os.environ.get(ENV_SEGMENT) or "{}")


def facts() -> dict:
    """What the driver knows of the run and a worker does not: devices, optimizer_steps_per_version."""
    return {"devices": 1, "optimizer_steps_per_version": 1, **json.loads(os.environ.get(ENV_FACTS) or "{}")}


def to_json(segment: Segment) -> str:
    return json.dumps(dataclasses.asdict(segment), sort_keys=True)
