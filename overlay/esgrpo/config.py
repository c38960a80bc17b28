"""The config group `actor_rollout_ref.rollout.segment`: frozen dataclasses, defaults, validation.

The driver validates once and hands the result to every other process in the environment (ESGRPO_SEGMENT), because
vLLM's EngineCore is a spawned interpreter that sees neither Hydra nor Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from esgrpo import conditions, refusals
from esgrpo.algo.terms import Feature, NullGroups, Treatment
from esgrpo.errors import ConfigError
from esgrpo.refusals import PREFIX

ENV_SEGMENT = "ESGRPO_SEGMENT"
ENV_FEATURES = "ESGRPO_FEATURES"
ENV_FACTS = "ESGRPO_FACTS"
BOUNDARIES = ("boundary", "routing.tail_share")  # without one of them a boundary of a response is counted, no more
COUNTED = "esgrpo/boundaries/mean"


def _number(default, low, high, doc, open_low=False, needs=(), nothing_at=None, still=""):
    """A numeric field with its inclusive range; None stands for no bound, open_low excludes `low` itself. `nothing_at`:
    a value at which nothing is decided, and what is done then; `still`: what moves without what it needs."""
    return field(default=default, metadata={"low": low, "high": high, "doc": doc, "open_low": open_low,
                                            "needs": needs, "nothing_at": nothing_at, "still": still})


def _choice(default, options, doc, needs=()):
    return field(default=default, metadata={"options": options, "doc": doc, "needs": needs})


def _flag(default, doc, needs=()):
    """A switch. `needs` are keys of which one must be on, or the switch has no effect."""
    return field(default=default, metadata={"doc": doc, "needs": needs})


def _section(cls, needs=("enable",)):
    """A group of keys; `needs` as for a switch, for all of them."""
    return field(default_factory=cls, metadata={"needs": needs})


def _text(default, doc):
    return field(default=default, metadata={"doc": doc, "text": True})


@dataclass(frozen=True)
class Repetition:
    """A loop is proven by its length and by the model's own certainty; under the audit if that is on.

    Repetition alone proves nothing: a number, a table or a matrix repeats itself, too.
    """

    enable: bool = _flag(False, "prune a response that repeats one pattern for long and is certain of it")
    min_span: int = _number(256, 2, None, "a loop repeats one pattern for at least so many tokens, up to its last one")
    max_pattern_size: int = _number(32, 1, 1024, "longest repeated pattern, tokens; at most half of min_span")
    max_surprisal: float = _number(0.01, 0.0, None, "largest mean surprisal (-log-prob) of these tokens, nats a token")
    check_interval: int = _number(128, 1, None, "tokens between two looks at a response")


@dataclass(frozen=True)
class Resolved:
    """Group rule: finished members agree and nobody who is left is likely to differ (VADE's zero-variance groups)."""

    enable: bool = _flag(False, "prune the rest of a group whose outcome is as good as known")
    null_prob: float = _number(0.05, 0.0, 1.0, "largest probability that an unfinished member differs", open_low=True)


@dataclass(frozen=True)
class Verdict:
    """Learned verdicts: a running response that will fail is told by a score (algo/verdict.py)."""

    enable: bool = _flag(False, "cut a response that a learned score says will fail; nothing is cut before the score "
                                "is proven on this run's own outcomes")
    check_interval: int = _number(0, 0, None, "tokens between two looks at a response; 0: a 16th of the longest one")
    cut_below: float = _number(0.1, 0.0, 0.5, "a response is a candidate below this probability of ending correct; the "
                               "gate goes up to twice as high where outcomes allow that, too, and to half of it "
                               "where they do not allow it", open_low=True)
    min_outcomes: int = _number(500, 1, None, "responses seen to their end before anything is cut")


@dataclass(frozen=True)
class Audit:
    """How pruning by group rules, by learned verdicts, and of loops, is measured and bounded."""

    enable: bool = _flag(False, "exempt candidates by a coin, and see how often a rule would have been wrong",
                         needs=("prune.resolved.enable", "prune.finish_group_after", "prune.repetition.enable",
                                "prune.verdict.enable"))
    exempt_prob: float = _number(0.1, 0.0, 1.0, "a candidate for pruning runs to its end with this probability",
                                 open_low=True, nothing_at=(1.0, "nothing is cut, and what a cut would have cost is "
                                                            "measured"))
    max_fraction: float = _number(0.5, 0.0, 1.0, "share of a group's members that may be pruned")
    window: int = _number(500, 10, None, "exempted candidates that the false-prune rate is computed from, per rule")
    min_candidates: int = _number(50, 1, None, "exempted candidates before a rule may prune; "
                                  "more where the bound could not be met by fewer")
    max_false_rate: float = _number(0.05, 0.0, 1.0, "the rule tightens when the bound on its false-prune rate is above")


@dataclass(frozen=True)
class Prune:
    treatment: str = _choice(
        "failed", tuple(map(str, Treatment)), "what becomes of a response that is cut. failed: trained as it is, a "
        "failure; value: trained with its predicted reward; doubly_robust: the same, corrected by weighted responses "
        "that the coin spared; masked: left out, and those that the coin spared are weighted",
        needs=("prune.repetition.enable", "prune.resolved.enable", "prune.finish_group_after", "prune.verdict.enable"))
    repetition: Repetition = field(default_factory=Repetition)
    resolved: Resolved = field(default_factory=Resolved)
    verdict: Verdict = field(default_factory=Verdict)
    audit: Audit = field(default_factory=Audit)
    finish_group_after: int = _number(
        0, 0, None, "stragglers may be pruned once this many members are done, right and wrong ones; needs the audit "
        "and a treatment with weights"
    )


@dataclass(frozen=True)
class History:
    """What is remembered of a prompt, by its content: lengths and correctness of earlier responses (RhymeRL)."""

    enable: bool = _flag(False, "keep a history of every prompt and forecast from it")
    path: str = _text("", "file of the history; empty: esgrpo/history.json in the run directory")
    max_prompts: int = _number(200_000, 1, None, "prompts remembered; the least recently seen are forgotten first")
    decay: float = _number(0.8, 0.0, 1.0, "weight of what was known when a prompt is seen again")
    half_life: int = _number(200, 1, None, "weight versions after which an unseen prompt's history counts half")


@dataclass(frozen=True)
class Routing:
    enable: bool = _flag(False, "order prompts and choose replicas by predicted length")
    ageing: int = _number(64, 1, None, "a prompt goes next once this many others overtook it")
    lookahead: int = _number(0, 0, None, "prompts that may wait for their turn; 0: what runs at once")
    short_quantile: float = _number(0.5, 0.0, 1.0, "predicted below this quantile of all lengths: never segmented",
                                    needs=BOUNDARIES, still=COUNTED)
    tail_quantile: float = _number(0.8, 0.0, 1.0, "predicted above this quantile of all lengths: tail class",
                                   needs=("routing.tail_share",))
    # None by default: a share of 0.25 was slower in 17 of 20 simulated asynchronous settings, by 0.1 of verl's
    # updates/s where KV memory is scarce, and faster in three, by 0.02 at most; under a barrier it was slower, too
    tail_share: float = _number(0.0, 0.0, 0.9,
                                "largest share of replicas kept for the tail class, but one of two or three; 0: none")
    tail_fraction: float = _number(0.8, 0.0, 1.0, "finished share of a group at which the rest becomes tail class",
                                   open_low=True, needs=("routing.tail_share",))


@dataclass(frozen=True)
class Sampler:
    """Prompt selection by the gradient that a group promises, p (1 - p)^2."""

    enable: bool = _flag(False, "prefer prompts that are likely to give a gradient")
    choice: str = _choice("expected", ("expected", "thompson"),
                          "p(1-p)^2: its mean under the posterior, or that of a sampled p (VADE)")
    candidates: int = _number(32, 2, 1024, "prompts drawn for one that is taken")
    uniform: float = _number(0.1, 0.0, 1.0, "share of prompts taken without a choice, so that none is lost for ever",
                             nothing_at=(1.0, "no prompt is preferred: they are drawn at random, and one that was "
                                         "taken rests"))


@dataclass(frozen=True)
class Sync:
    requests: str = _choice("abort", ("abort", "keep"), "what a weight sync does to running requests")
    kv: str = _choice("keep", ("keep", "rebuild"), "KV cache of kept requests: go on with it, or prefill it again",
                      needs=("sync.requests",))


@dataclass(frozen=True)
class Overlap:
    """Control of how far rollout and training overlap (`algo/overlap.py`), in verl's fully-async trainer; in v1's
    separate_async of the prompts in process alone."""

    enable: bool = _flag(False, "move concurrency, staleness bound and trigger at weight versions, by measured rates "
                         "(v1's separate_async: prompts in process)",
                         needs=("enable", "observe"))
    override: bool = _flag(False, "move what was set by hand, too: values of async_training, or of trainer.v1, "
                           "other than verl's own")
    age_scale: float = _number(4.0, 0.0, None, "age that costs a token 1 - 1/e of its worth, optimiser steps",
                               open_low=True)
    max_concurrency: int = _number(0, 0, None, "most prompts in flight; 0: what max_num_seqs of the replicas allows")
    max_staleness: float = _number(8.0, 0.0, None, "largest async_training.staleness_threshold; v1: batches in process")
    max_batches: int = _number(8, 1, None, "most mini-batches that the trainer takes at once")


@dataclass(frozen=True)
class Pois:
    anchor: str = _choice("auto", ("auto", "token", "version"), "which policy is the denominator of the ratio; auto: "
                          "token with one optimiser step a weight version, version with more")


@dataclass(frozen=True)
class Dmmpt:
    enable: bool = _flag(False, "mask well-mastered positive tokens (UloRL, eq. 10)")
    tau: float = _number(0.99, 0.0, 1.0, "a positive token with probability >= tau is mastered")
    sigma: float = _number(0.2, 0.0, None, "mask only in responses with mean entropy below sigma, nats")


@dataclass(frozen=True)
class Segment:
    """Everything under `segment`. With enable=False and observe=False no hook is on the path."""

    profile: str = _choice("custom", ("custom", "off", "static", "elastic"),
                           "defaults of all other keys: verl, segments submitted again at once, or the method without "
                           "what needs other settings to decide anything")
    seed: int = _number(0, 0, None, "of every random decision; 0: data.seed")
    enable: bool = _flag(False, "segment rollout")
    observe: bool = _flag(False, "measure and record, decide nothing (the baseline arm of a comparison)")
    segment_length: int = _number(1024, 2, None, "tokens between two boundaries of a response", needs=BOUNDARIES,
                                  still=COUNTED)
    boundary: str = _choice("soft", ("soft", "yield"), "what a boundary does: evaluate only, or hand the response back",
                            needs=("enable",))
    capacity: int = _number(0, 0, None, "requests at which a replica is full, for bubble_rate; 0: max_num_seqs",
                            needs=("enable", "observe"))
    null_groups: str = _choice(
        "train", tuple(map(str, NullGroups)), "finished groups whose rewards are all alike: trained, as verl's "
        "fully async loop does, or another prompt in their place, always (replace, DAPO's dynamic sampling) or while "
        "enough others wait for the trainer (spare; under v1's separate_async the places of what verl's own "
        "filter will leave out, before the trainer asks)", needs=("enable",))
    max_failed_prompts: float = _number(
        0.01, 0.0, 1.0, "share of a weight version's prompts whose reward may raise, at least one prompt; 0: none",
        needs=("enable",)
    )
    sigterm_deadline: int = _number(600, 0, None, "seconds that a SIGTERM waits for the checkpoint of the running step")
    kv_headroom: float = _number(
        0.0, 0.0, 0.9, "share of a replica's KV cache that stays free when a request is let in, for those that run: "
        "fewer lose their KV cache and are computed again", needs=("enable",)
    )
    token_outputs: bool = _flag(False, "no text is made of tokens: verl reads their ids and log-probs")
    success_threshold: float = _number(
        0.5, None, None, "a sample is correct from this score (or numeric acc) on; a boolean acc decides alone"
    )
    history: History = _section(History)
    routing: Routing = _section(Routing)
    prune: Prune = _section(Prune)
    sampler: Sampler = _section(Sampler)
    sync: Sync = _section(Sync)
    overlap: Overlap = field(default_factory=Overlap)
    pois: Pois = field(default_factory=Pois)
    dmmpt: Dmmpt = field(default_factory=Dmmpt)

    @property
    def prunes(self) -> bool:
        prune = self.prune
        return self.enable and (prune.repetition.enable or self.audited)

    @property
    def masks(self) -> bool:
        """Responses that are cut are left out of the batch."""
        return self.prunes and self.prune.treatment == Treatment.MASKED

    @property
    def keeps(self) -> bool:
        """A weight sync leaves running requests in the engine."""
        return self.enable and self.sync.requests == "keep"

    @property
    def audited(self) -> bool:
        """A coin is tossed for candidates of group rules, which are always audited, and for proven loops."""
        prune = self.prune
        return self.enable and (prune.resolved.enable or prune.finish_group_after > 0 or prune.verdict.enable
                                or (prune.audit.enable and prune.repetition.enable))

    @property
    def weighted(self) -> bool:
        """Advantages need more than rewards: keep probabilities, or what was predicted of a response."""
        return self.audited and self.prune.treatment != Treatment.FAILED


# What a profile sets where the user says nothing. `static` cuts as UloRL does, but submits again at once.
PROFILES: dict[str, dict] = {
    "custom": {},
    "off": {},
    "static": {"enable": True, "boundary": "yield"},
    # What was measured to bring something or to cost nothing (README's table of modules). Group rules brought nothing.
    # prune.treatment=failed is the only one that leaves verl's estimator as it is.
    "elastic": {
        "enable": True,
        "history": {"enable": True},
        "routing": {"enable": True},
        "prune": {"repetition": {"enable": True}, "verdict": {"enable": True}, "audit": {"enable": True}},
        "sampler": {"enable": True},
        "sync": {"requests": "keep"},
        "null_groups": "spare",
        "kv_headroom": 0.05,
        "token_outputs": True,
    },
}


def _merged(below: Mapping, above: Mapping) -> dict:
    """`above` over `below`, key by key."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _build(cls, values, path: str, mistakes: list[ConfigError]):
    """The section, without what is a mistake in `values`."""
    if not isinstance(values, Mapping):
        mistakes.append(ConfigError(path, f"{values!r}", "a mapping", "the run does not start",
                                    f"use +{path}.<key>=<value>"))
        return cls()
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        try:
            refusals.check_key(f"{path}.{key}", key, value, fields, Segment)
            spec = fields[key]
            nested = spec.default_factory is not dataclasses.MISSING
            arguments[key] = (_build(spec.default_factory, value, f"{path}.{key}", mistakes) if nested
                              else refusals.check_value(f"{path}.{key}", spec.metadata, spec.type, value))
        except ConfigError as error:
            mistakes.append(error)
    return cls(**arguments)


def mistakes_of(values: Mapping | None) -> list[ConfigError]:
    """All keys and values of a plain mapping that `parse` would refuse by themselves, in order."""
    found: list[ConfigError] = []
    _build(Segment, {} if values is None else values, PREFIX, found)
    return found


def _built(values: Mapping) -> Segment:
    mistakes: list[ConfigError] = []
    segment = _build(Segment, values, PREFIX, mistakes)
    for error in mistakes:
        raise error
    return segment


def parse(values: Mapping | None, response_length: int | None = None) -> Segment:
    """Validated `Segment` from a plain mapping.

    Raises ConfigError (one line: key, value, allowed range, closest valid key) for unknown or impossible values.
    `response_length` is the response budget in tokens.
    """
    values = {} if values is None else values
    _built(values)  # what the user said must be right by itself
    profile = values.get("profile", "custom")
    segment = _built(_merged(PROFILES[profile], values))
    if segment.enable != PROFILES[profile].get("enable", segment.enable):
        raise ConfigError(f"{PREFIX}.enable", "false", f"true with {PREFIX}.profile={profile}",
                          "all that the profile switches on needs it, the run does not start",
                          "drop it, or set profile=off, which is plain verl")
    if (response_length is not None and "segment_length" not in values and segment.boundary == "soft"
            and segment.segment_length > response_length):
        segment = dataclasses.replace(segment, segment_length=response_length)  # the default knows no response
    if response_length is not None and segment.enable and segment.segment_length > response_length:
        raise ConfigError(f"{PREFIX}.segment_length", str(segment.segment_length),
                          f"an integer in [2, {response_length}] (data.max_response_length)",
                          "no boundary would ever be reached, the run does not start",
                          f"set it, or another profile than {profile}" if "segment_length" not in values
                          else "lower it")
    refusals.check_sections(segment, _without_effect(segment))
    return segment


def _without_effect(segment: Segment):
    return conditions.without_effect(segment, _built(PROFILES[segment.profile]), Segment())


def idle(segment: Segment, response_length: int | None = None) -> list[str]:
    """One line for each number or path that was set although what it belongs to is off, or decides nothing by it.

    Nobody is blamed for a `segment_length` that keeps the default below `response_length`.
    """
    forced = "segment_length" if (response_length or math.inf) < Segment.segment_length else ""
    lines = []
    for key, value, needed in _without_effect(segment):
        still = conditions.spec_of(Segment, key).metadata.get("still")
        if key != forced:
            lines.append(f"{PREFIX}.{key}={value}: no effect {f'but on {still} ' if still else ''}without "
                         f"{PREFIX}.{f' or {PREFIX}.'.join(needed)}")
    return lines + [f"{PREFIX}.{key}={value}: {left}"
                    for key, value, left in conditions.deciding_nothing(segment, Segment())]


def features(segment: Segment, loss_mode: str, weighs_cut_rows: bool = False) -> frozenset[str]:
    """Names that hooks are switched on by; `weighs_cut_rows`: because of how the loss is aggregated."""
    switches = {Feature.OBSERVE: segment.enable or segment.observe, Feature.SEGMENT: segment.enable,
                Feature.PRUNE: segment.prunes, Feature.YIELD: segment.enable and segment.boundary == "yield",
                Feature.HISTORY: segment.history.enable, Feature.ROUTING: segment.routing.enable,
                Feature.TAILS: segment.routing.enable and segment.routing.tail_share > 0,
                Feature.SAMPLER: segment.sampler.enable,
                Feature.WEIGHTED: segment.weighted or segment.masks or weighs_cut_rows,
                Feature.KEEP: segment.keeps, Feature.TOKEN_OUTPUTS: segment.token_outputs,
                Feature.NULL_GROUPS: segment.enable and segment.null_groups != NullGroups.TRAIN,
                Feature.OVERLAP: segment.overlap.enable, Feature.DMMPT: segment.dmmpt.enable,
                Feature.POIS: loss_mode == "pois", Feature.SAIS: loss_mode == "sais"}
    return frozenset(name for name, on in switches.items() if on)


@functools.lru_cache(maxsize=4)
def _from_json(text: str) -> Segment:
    return parse(json.loads(text))


def current() -> Segment:
    """The settings of this run, in any process; defaults when the driver has set none."""
    return _from_json(os.environ.get(ENV_SEGMENT) or "{}")


def facts() -> dict:
    """What the driver knows of the run and a worker does not.

    devices, replicas, optimizer_steps_per_version, prompts_per_version, batches_per_version (of the trainer's metrics),
    response_length (tokens), trainer (as algo/decisions.py names them), overlap_fixed (settings that are not moved),
    weighs_cut_rows (because of how the loss is aggregated), alike_is_null (rewards of a group that are all alike leave
    no gradient).
    """
    defaults = {"devices": 1, "replicas": 1, "optimizer_steps_per_version": 1, "prompts_per_version": 1,
                "batches_per_version": 1, "response_length": 0, "trainer": "", "overlap_fixed": (),
                "weighs_cut_rows": False, "alike_is_null": False}
    return {**defaults, **json.loads(os.environ.get(ENV_FACTS) or "{}")}


def to_json(segment: Segment) -> str:
    return json.dumps(dataclasses.asdict(segment), sort_keys=True)
