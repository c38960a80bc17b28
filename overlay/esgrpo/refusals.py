"""What is refused of the group `segment`: keys that do not exist, values out of range, settings that contradict each
other. Each of them is a ConfigError of one line; `config.py` says what may be set."""

from __future__ import annotations

import difflib
import math

from esgrpo import conditions
from esgrpo.algo import decisions
from esgrpo.algo.terms import PREDICTED, UNBIASED, Treatment
from esgrpo.errors import ConfigError

PREFIX = "actor_rollout_ref.rollout.segment"

# Keys that were there once, and why they are not any more.
REMOVED = {f"{PREFIX}.prune.hopeless": "drop it: it never pruned anything, because no forecast exceeds the budget; "
                                       "prune.resolved and prune.repetition are the rules that act"}
REMOVED |= dict.fromkeys((f"{PREFIX}.prune.repetition.min_count", f"{PREFIX}.prune.repetition.min_pattern_size"),
                         "drop it: a count of patterns proves no loop; prune.repetition.min_span and "
                         "prune.repetition.max_surprisal do")
REMOVED[f"{PREFIX}.prune.repetition.keep_row"] = (
    "drop it: prune.treatment=failed, the default, is True; prune.treatment=masked is False")
REMOVED[f"{PREFIX}.elastic"] = ("drop it: segments whose length follows the group were measured to bring nothing "
                                "(docs/method.md); routing.tail_fraction is what elastic.tail_fraction was")

MOST_MEANT = 4  # candidates for an unknown key; more are no advice

# (section, smaller, larger): bounds that must be in order
IN_ORDER = (("prune.audit", "min_candidates", "window"), ("routing", "short_quantile", "tail_quantile"))


def _range_text(spec, kind: str) -> str:
    low, high = spec["low"], spec["high"]
    number, bracket = "an integer" if kind == "int" else "a number", "(" if spec.get("open_low") else "["
    return f"{number} in {bracket}{'-inf' if low is None else low}, {'inf' if high is None else high}]"


def check_value(path: str, spec, kind: str, value):
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
    if "text" in spec:
        if not isinstance(value, str):
            fail("a string")
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (kind == "int" and not isinstance(value, int)):
        fail(_range_text(spec, kind))
    low, high = spec["low"], spec["high"]
    outside = (low is not None and value < low) or (high is not None and value > high) or not math.isfinite(value)
    if outside or (spec.get("open_low") and value == low):
        fail(_range_text(spec, kind))
    return float(value) if kind == "float" else value


def check_key(path: str, key, value, fields, group) -> None:
    """`fields` are those of the key's section, `group` is the class of all of them."""
    if path in REMOVED:
        raise ConfigError(path, f"{value!r}", "no such key", "the run does not start", REMOVED[path])
    if key not in fields:
        meant = _meant(path, str(key), fields, [known for known, *_ in conditions.leaves(group)])
        raise ConfigError(path, f"unknown key with value {value!r}", f"one of {', '.join(fields)}",
                          "the run does not start", f"did you mean {' or '.join(meant)}?" if meant else
                          "drop it, or take one of these")


def _meant(path: str, key: str, fields, known: list[str]) -> list[str]:
    """What an unknown key may stand for: a key or section of this name elsewhere, those below its own section first;
    the switch of the module that `esgrpo status` calls so; else a sibling that is spelt alike."""
    section = path.removesuffix(key)
    split = [one.split(".") for one in known]
    same = dict.fromkeys(".".join([PREFIX, *parts[:parts.index(key) + 1]]) for parts in split if key in parts)
    same = [one for one in same if one.startswith(section)] or list(same)
    if not same:  # a module whose name is no key
        same = [f"{PREFIX}.{switch}" for module in decisions.MODULES if module.name == key
                for switch in module.switch.split(" or ")]
    same = same or [f"{section}{name}" for name in difflib.get_close_matches(key, fields, 1)]
    return same if len(same) <= MOST_MEANT else []


def check_sections(segment, without_effect) -> None:
    """Sections that need another one, and bounds that must be in order; `without_effect` as of `conditions`."""
    def needs(section: str, wanted: str, why: str):
        raise ConfigError(f"{PREFIX}.{section}", "true", wanted, f"{why}, the run does not start",
                          f"set {wanted.split(' = ')[0].split(' or ')[0]}=True or {section}=False")

    if segment.observe and segment.enable:
        raise ConfigError(f"{PREFIX}.observe", "true", f"false with {PREFIX}.enable", "observe is the run that is "
                          "measured and decides nothing, and enable decides, the run does not start",
                          "drop observe (an enabled run is measured, too), or " + (
                              "enable" if segment.profile in ("custom", "off") else "set profile=off"))
    if segment.routing.enable and not segment.history.enable:
        needs("routing.enable", f"{PREFIX}.history.enable", "there would be no forecast to route by")
    if segment.sampler.enable and not segment.history.enable:
        needs("sampler.enable", f"{PREFIX}.history.enable", "there would be no posterior to sample from")
    if segment.prune.resolved.enable and not segment.prune.audit.enable:
        needs("prune.resolved.enable", f"{PREFIX}.prune.audit.enable", "nothing would measure wrongly pruned responses")
    if segment.prune.verdict.enable and not segment.prune.audit.enable:
        needs("prune.verdict.enable", f"{PREFIX}.prune.audit.enable", "nothing would measure wrong verdicts")
    if segment.prune.verdict.enable and segment.prune.treatment == Treatment.MASKED:
        raise ConfigError(f"{PREFIX}.prune.verdict.enable", "true", f"False with {PREFIX}.prune.treatment=masked",
                          "the weights of what the coin spares cost more variance than verdicts save, the run does not "
                          "start", "set prune.treatment=failed, value or doubly_robust, or prune.verdict.enable=False")
    if segment.prune.finish_group_after and not segment.prune.audit.enable:
        raise ConfigError(f"{PREFIX}.prune.finish_group_after", str(segment.prune.finish_group_after),
                          f"0 without {PREFIX}.prune.audit.enable",
                          "optional stopping drops long answers and nothing would weigh the rows that are kept, the "
                          "run does not start", "set prune.audit.enable=True or drop the key")
    treatment = segment.prune.treatment
    if segment.prune.finish_group_after and treatment not in UNBIASED:
        raise ConfigError(f"{PREFIX}.prune.finish_group_after", str(segment.prune.finish_group_after),
                          f"0 with {PREFIX}.prune.treatment={treatment}",
                          "optional stopping predicts nothing, and right stragglers would be trained as wrong, the run "
                          "does not start", "set prune.treatment=masked or doubly_robust, or drop the key")
    if segment.prunes and treatment in PREDICTED and not segment.prune.audit.enable:
        raise ConfigError(f"{PREFIX}.prune.treatment", treatment, f"{PREFIX}.prune.audit.enable with it",
                          "nobody would predict a reward, the run does not start",
                          "set prune.audit.enable=True, or prune.treatment=failed")
    if segment.token_outputs and not (segment.enable or segment.observe):
        needs("token_outputs", f"{PREFIX}.observe or {PREFIX}.enable", "no process would tell its hooks")
    if segment.history.enable and not segment.enable:
        needs("history.enable", f"{PREFIX}.enable", "history acts on segments")
    for key, value, needed in without_effect:
        if isinstance(value, bool) or value in (conditions.spec_of(type(segment), key).metadata.get("options") or ()):
            raise ConfigError(f"{PREFIX}.{key}", str(value).lower(),
                              f"{PREFIX}.{f' or {PREFIX}.'.join(needed)} with it",
                              "it would have no effect, the run does not start",
                              f"{_switched_on(type(segment), needed[0])}, too, or drop {key}")
    span, pattern = segment.prune.repetition.min_span, segment.prune.repetition.max_pattern_size
    if span < 2 * pattern:
        raise ConfigError(f"{PREFIX}.prune.repetition.min_span", str(span),
                          f"at least twice max_pattern_size = {pattern}",
                          "what was seen once is no repetition, the run does not start",
                          f"set min_span to {2 * pattern} or more, or lower max_pattern_size")
    for section, smaller, larger in IN_ORDER:
        low, high = (conditions.value_of(segment, f"{section}.{name}") for name in (smaller, larger))
        if low > high:
            raise ConfigError(f"{PREFIX}.{section}.{smaller}", str(low), f"at most {larger} = {high}",
                              "the run does not start", f"lower it, or raise {larger}")


def _switched_on(cls, key: str) -> str:
    """What to do so that this key is on, that is, differs from its default."""
    spec = conditions.spec_of(cls, key)
    others = [option for option in spec.metadata.get("options") or () if option != spec.default]
    return f"set {key}={others[0]}" if others else f"switch {key} on" if spec.type == "bool" else f"set {key}"
