"""The config group: ranges, unknown keys, and one line for every refusal."""

import dataclasses
import json
import math

import pytest

from esgrpo import conditions, config, refusals
from esgrpo.config import PREFIX, Segment, parse
from esgrpo.errors import ConfigError, EsgrpoError


def leaves(cls=Segment, path=()):
    """(path, field) of every leaf under `segment`."""
    for field in dataclasses.fields(cls):
        if field.default_factory is dataclasses.MISSING:
            yield (*path, field.name), field
        else:
            yield from leaves(field.default_factory, (*path, field.name))


LEAVES = list(leaves())
NUMBERS = [(path, field) for path, field in LEAVES if field.type in ("int", "float")]
NAMES = [".".join(path) for path, _ in LEAVES]


def nested(path, value):
    for key in reversed(path):
        value = {key: value}
    return value


def value_of(segment, path):
    for key in path:
        segment = getattr(segment, key)
    return segment


def refusal(values, **arguments) -> str:
    """The one line with which `values` is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(values, **arguments)
    line = str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, EsgrpoError)
    assert "\n" not in line and line.startswith("esgrpo: ") and line.count(" | ") == 3, line
    return line


@pytest.mark.parametrize("value", [0, 1, -1, 1.5, 4.0, "abc", "1024", True, None, math.nan, math.inf, [2], {"a": 2}],
                         ids=repr)
def test_impossible_segment_lengths(value):
    line = refusal({"segment_length": value})
    assert f"{PREFIX}.segment_length: {value!r} |" in line and "wanted an integer in [2, inf] |" in line


@pytest.mark.parametrize("value", [2, 1024, 10**9])
def test_possible_segment_lengths(value):
    assert parse({"segment_length": value}).segment_length == value


def test_a_segment_longer_than_the_response_budget():
    line = refusal({"enable": True, "segment_length": 513}, response_length=512)
    assert "513" in line and "[2, 512] (data.max_response_length)" in line
    assert parse({"enable": True, "segment_length": 512}, response_length=512).segment_length == 512
    assert parse({"segment_length": 513}, response_length=512).enable is False  # off: nothing can be wrong with it


PAIRS = ("max_pattern_size", "min_span", "max_length", "min_length", "short_quantile", "tail_quantile",
         "window", "min_candidates")


@pytest.mark.parametrize("path, field", NUMBERS, ids=[".".join(p) for p, _ in NUMBERS])
def test_every_bound_is_where_it_says(path, field):
    low, high = field.metadata["low"], field.metadata["high"]
    step = 1 if field.type == "int" else 1e-9
    for bound, outside in ((low, -step), (high, step)):
        if bound is None:
            continue
        assert ".".join((PREFIX, *path)) in refusal(nested(path, bound + outside))
        if bound == low and field.metadata["open_low"]:
            refusal(nested(path, bound))
        elif path[-1] not in PAIRS:  # these bound one another
            assert value_of(parse(nested(path, bound)), path) == bound
    for wrong in ("abc", True, None, math.nan):
        refusal(nested(path, wrong))


@pytest.mark.parametrize("path, field", LEAVES, ids=NAMES)
def test_every_leaf_has_a_valid_default_and_a_sentence(path, field):
    default = field.default
    assert value_of(parse(nested(path, default)), path) == default == value_of(Segment(), path)
    assert len(field.metadata["doc"]) > 10
    assert field.type in ("bool", "int", "float") or default in field.metadata.get("options", [""])
    assert type(default).__name__ == field.type or field.type == "float"


@pytest.mark.parametrize("path, field", [leaf for leaf in LEAVES if leaf[1].type == "bool"],
                         ids=[".".join(p) for p, f in LEAVES if f.type == "bool"])
def test_switches_take_nothing_but_booleans(path, field):
    for wrong in (1, 0, "True", "false", None):
        assert "true or false" in refusal(nested(path, wrong))


NEEDS_MORE = {"history.enable": {"enable": True},
              "routing.enable": {"enable": True, "history": {"enable": True}},
              "sampler.enable": {"enable": True, "history": {"enable": True}},
              "prune.resolved.enable": {"enable": True, "prune": {"audit": {"enable": True}}},
              "token_outputs": {"observe": True}}


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_a_section_without_what_it_needs_is_refused(name):
    path = tuple(name.split("."))
    line = refusal(nested(path, True))
    assert f"{PREFIX}.{name}" in line and "=True or" in line
    merged = nested(path, True)
    for key, value in NEEDS_MORE[name].items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    assert value_of(parse(merged), path) is True


GATED = [(key, spec, needs) for key, spec, needs in conditions.leaves(Segment) if needs]
FREE = {"profile", "enable", "observe"}  # the main switches
LOSS = {"pois.anchor", "dmmpt.enable"}  # what these need is the loss, which config_rules knows


def another(key, spec):
    """A valid value that is not the default."""
    default, high = spec.default, spec.metadata.get("high")
    if spec.type == "bool":
        return not default
    if "options" in spec.metadata:
        return next(option for option in spec.metadata["options"] if option != default)
    if spec.type == "str":
        return "elsewhere.json"
    pair = next((pair for pair in refusals.IN_ORDER if key.startswith(pair[0] + ".") and key.endswith(pair[1:])), None)
    if pair is not None:  # the smaller one goes down, the larger one up
        return default * 0.9 if spec.type == "float" and key.endswith(pair[1]) else (
            min(high or math.inf, default * 1.1) if spec.type == "float" else
            default - 1 if key.endswith(pair[1]) else default + 1)
    return default + 1 if spec.type == "int" and (high is None or default < high) else (
        default - 1 if spec.type == "int" else (default + (1.0 if high is None else high)) / 2)


def with_needs(values, needs):
    """`values` with the first alternative of every condition on, and what that one needs."""
    specs = {key: (spec, conditions_) for key, spec, conditions_ in conditions.leaves(Segment)}
    for names in needs:
        spec, more = specs[names[0]]
        if value_at(values, names[0]) is None:
            values = config._merged(values, nested(names[0].split("."), another(names[0], spec)))
            values = with_needs(values, more)
    for switch, other in (("routing.enable", "history.enable"), ("sampler.enable", "history.enable"),
                          ("history.enable", "enable"), ("prune.resolved.enable", "prune.audit.enable"),
                          ("prune.audit.enable", "prune.resolved.enable"),
                          ("prune.verdict.enable", "prune.audit.enable"),
                          ("prune.finish_group_after", "prune.audit.enable"),
                          ("prune.treatment", "prune.audit.enable")):
        if value_at(values, switch) and value_at(values, other) is None:
            values = with_needs(values, ((other,),))
    if value_at(values, "prune.finish_group_after"):
        values = config._merged(values, {"prune": {"treatment": "masked"}})
    return values


def value_at(values, key):
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def test_every_key_below_a_switch_is_gated():
    ungated = {key for key, _, needs in conditions.leaves(Segment) if not needs} - FREE - LOSS
    assert all("." not in key for key in ungated), ungated  # each section says what it needs
    assert {"prune.repetition.enable", "sync.requests", "sync.kv", "boundary", "prune.audit.window"} <= {
        key for key, _, _ in GATED}


@pytest.mark.parametrize("key, spec, needs", GATED, ids=[key for key, _, _ in GATED])
def test_a_key_without_what_it_needs_is_refused_or_said(key, spec, needs):
    """By itself it is refused (switches) or said in one line (numbers); with all that it needs it is neither."""
    values = nested(key.split("."), another(key, spec))
    try:
        lines = config.idle(parse(values))
    except ConfigError as error:
        assert f"{PREFIX}.{key}" in str(error) and str(error).count(" | ") == 3
    else:
        assert spec.type in ("int", "float", "str") and "options" not in spec.metadata
        still = spec.metadata["still"] if spec.type != "str" else ""
        wanted = f"no effect but on {still} without" if still else "no effect without"
        assert any(line.startswith(f"{PREFIX}.{key}=") and wanted in line for line in lines), lines
    segment = parse(with_needs(values, needs))
    assert conditions.value_of(segment, key) == another(key, spec) and config.idle(segment) == []
    assert parse(json.loads(config.to_json(segment))) == segment  # what the driver accepted, every process does


@pytest.mark.parametrize("profile", list(config.PROFILES))
def test_a_profile_is_blamed_for_nothing(profile):
    assert config.idle(parse({"profile": profile})) == []


@pytest.mark.parametrize("profile", list(config.PROFILES))
def test_a_profile_without_the_main_switch_is_one_mistake(profile):
    values = {"profile": profile, "enable": False}
    if "enable" in config.PROFILES[profile]:
        assert f"{PREFIX}.enable: false | wanted true with {PREFIX}.profile={profile}" in refusal(values)
    else:
        assert config.idle(parse(values)) == []


@pytest.mark.parametrize("main", [{"enable": True}, {"profile": "elastic"}, {"profile": "static"}])
def test_a_run_that_decides_is_not_the_one_that_is_only_observed(main):
    assert f"{PREFIX}.observe: true" in refusal({**main, "observe": True})
    assert parse({"profile": "off", "observe": True}).observe


def test_a_profile_fits_a_short_response():
    """Where boundaries decide nothing; those of `static` would never be reached."""
    assert parse({"profile": "elastic"}, 512).segment_length == 512
    assert parse({"profile": "elastic"}, 4096).segment_length == Segment().segment_length
    assert "set it, or another profile than static" in refusal({"profile": "static"}, response_length=512)
    assert "lower it" in refusal({"profile": "elastic", "segment_length": 1024}, response_length=512)


def test_advice_for_a_choice_is_one_of_its_words():
    assert "set sync.requests=keep, too" in refusal({"enable": True, "sync": {"kv": "rebuild"}})
    assert "switch enable on, too" in refusal({"sync": {"requests": "keep"}})


def test_all_mistakes_are_known_at_once():
    values = {"profil": "elastic", "kv_headroom": 1.5, "sampler": {"enabled": True, "uniform": 0.2}, "seed": 3}
    found = config.mistakes_of(values)
    assert [error.args[0] for error in found] == [f"{PREFIX}.{key}" for key in ("profil", "kv_headroom",
                                                                               "sampler.enabled")]
    assert refusal(values) == str(found[0]) and config.mistakes_of({"seed": 3}) == config.mistakes_of(None) == []


@pytest.mark.parametrize("values, said", [
    ({"prune": {"resolved": {"enable": True}, "audit": {"enable": True, "exempt_prob": 1.0}}}, ["nothing is cut"]),
    ({"history": {"enable": True}, "sampler": {"enable": True, "uniform": 1.0}}, ["no prompt is preferred"]),
    ({"history": {"enable": True}, "sampler": {"enable": True, "uniform": 0.99}}, []),
    ({"sampler": {"uniform": 1.0}}, ["no effect without"])])
def test_a_value_at_which_nothing_is_decided_is_said(values, said):
    lines = config.idle(parse({"enable": True, **values}))
    assert len(lines) == len(said) and all(word in line for line, word in zip(lines, said, strict=True)), lines


HISTORY = {"enable": True, "history": {"enable": True}}


@pytest.mark.parametrize("values, idle", [
    ({"segment_length": 256}, ["segment_length"]), ({"segment_length": 256, "boundary": "yield"}, []),
    ({"segment_length": 1024}, []),
    ({"routing": {"enable": True, "short_quantile": 0.3, "tail_quantile": 0.9}},
     ["routing.short_quantile", "routing.tail_quantile"]),
    ({"boundary": "yield", "routing": {"enable": True, "short_quantile": 0.3, "tail_quantile": 0.9}},
     ["routing.tail_quantile"]),
    ({"segment_length": 256, "routing": {"enable": True, "short_quantile": 0.3, "tail_quantile": 0.9,
                                         "tail_share": 0.5}}, [])])
def test_boundaries_and_classes_that_nothing_reads_are_said(values, idle):
    lines = config.idle(parse({**HISTORY, **values}))
    assert [line.partition("=")[0] for line in lines] == [f"{PREFIX}.{key}" for key in idle]


def test_nobody_is_blamed_for_a_segment_length_that_the_response_length_asks_for():
    segment = parse({**HISTORY, "segment_length": 256}, 512)
    assert config.idle(segment, 512) == [] and len(config.idle(segment, 1024)) == 1


@pytest.mark.parametrize("section, smaller, larger", refusals.IN_ORDER)
def test_bounds_that_are_not_in_order(section, smaller, larger):
    high = conditions.value_of(Segment(), f"{section}.{larger}")
    spec = conditions.spec_of(Segment, f"{section}.{larger}")
    above = high + 1 if spec.type == "int" else (high + 1.0) / 2
    line = refusal(nested(section.split("."), {smaller: above}))
    assert f"{PREFIX}.{section}.{smaller}" in line and f"at most {larger} = {high}" in line


@pytest.mark.parametrize("path, field", [leaf for leaf in NUMBERS if leaf[1].type == "float"],
                         ids=[".".join(p) for p, f in NUMBERS if f.type == "float"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_no_number_is_infinite(path, field, value):
    assert ".".join((PREFIX, *path)) in refusal(nested(path, value))


def test_profiles_are_defaults_and_the_user_has_the_last_word():
    elastic = parse({"profile": "elastic", "prune": {"resolved": {"enable": True, "null_prob": 0.2}},
                     "sampler": {"enable": False}})
    assert elastic.prune.treatment == "failed" and elastic.prune.resolved.null_prob == 0.2
    assert not elastic.sampler.enable and elastic.sync.requests == "keep"
    assert parse(json.loads(config.to_json(elastic))) == elastic
    static = parse({"profile": "static", "segment_length": 64})
    assert static.enable and static.boundary == "yield" and not static.prunes
    assert config.features(parse({"profile": "off"}), "vanilla") == frozenset()
    assert {"history", "routing", "keep", "token_outputs"} <= config.features(elastic, "pois")


def test_choices_say_the_closest():
    assert "one of soft, yield (did you mean yield?)" in refusal({"boundary": "yeild"})
    assert "one of auto, token, version |" in refusal({"pois": {"anchor": 7}})
    assert parse({"enable": True, "boundary": "yield"}).boundary == "yield"


@pytest.mark.parametrize("values, closest", [
    ({"segment_lenght": 5}, "segment_length"), ({"enabled": True}, "enable"),
    ({"prune": {"repetiton": {"enable": True}}}, "prune.repetition"),
    ({"prune": {"repetition": {"min_sapn": 3}}}, "prune.repetition.min_span"),
    ({"dmmpt": {"Tau": 0.5}}, "dmmpt.tau"), ({"keep": True}, "sync.requests=keep"),
    ({"loops": {"enable": True}}, "prune.repetition.enable"), ({"verdicts": {"enable": True}}, "prune.verdict.enable"),
    ({"tail_share": 0.2}, "routing.tail_share"), ({"repetition": {"enable": True}}, "prune.repetition"),
    ({"routing": {"requests": "keep"}}, "sync.requests"),
    ({"prune": {"enable": True}}, f" or {PREFIX}.".join(
        f"prune.{rule}.enable" for rule in ("repetition", "resolved", "verdict", "audit"))),
    ({"segments": True}, f"boundary=yield or {PREFIX}.routing.tail_share"),
])
def test_an_unknown_key_comes_with_the_one_that_was_meant(values, closest):
    line = refusal(values)
    assert "unknown key" in line and line.endswith(f"| did you mean {PREFIX}.{closest}?")


@pytest.mark.parametrize("values", [{7: 1}, {"sync": {"enable": True}}, {"elastic_mode": True}])
def test_an_unknown_key_that_may_mean_anything_comes_without_advice(values):
    assert refusal(values).endswith("| drop it, or take one of these")


def test_the_name_of_a_module_that_is_no_key_is_answered_with_its_switch():
    from esgrpo import conditions
    from esgrpo.algo import decisions

    parts = {part for key, *_ in conditions.leaves(Segment) for part in key.split(".")}
    modules = [module for module in decisions.MODULES if module.name not in parts]
    assert {"segments", "loops", "verdicts"} <= {module.name for module in modules}
    for module in modules:
        said = refusal({module.name: True})
        assert all(f"{PREFIX}.{switch}" in said for switch in module.switch.split(" or ")), said


@pytest.mark.parametrize("profile, todo", [("off", "or enable"), ("custom", "or enable"),
                                           ("elastic", "or set profile=off")])
def test_advice_for_observe_with_enable_is_not_done_yet(profile, todo):
    assert refusal({"profile": profile, "enable": True, "observe": True}).endswith(todo)


@pytest.mark.parametrize("values", [True, False, 0, 1, "", "on", [], ["enable"]], ids=repr)
def test_a_group_must_be_a_mapping(values):
    assert f"{PREFIX}: {values!r} | wanted a mapping" in refusal(values)
    assert f"{PREFIX}.prune: {values!r} | wanted a mapping" in refusal({"prune": values})


def test_nothing_given_is_all_defaults():
    assert parse(None) == parse({}) == Segment()


def test_a_pattern_stands_at_least_twice_in_a_loop():
    assert "at least twice max_pattern_size = 4" in refusal(
        {"prune": {"repetition": {"min_span": 7, "max_pattern_size": 4}}})
    assert parse({"prune": {"repetition": {"min_span": 8, "max_pattern_size": 4}}}).prune.repetition.min_span == 8


AUDIT = {"audit": {"enable": True}}


@pytest.mark.parametrize("prune, audited", [
    ({"repetition": {"enable": True}}, False), ({"repetition": {"enable": True}, **AUDIT}, True),
    ({"repetition": {"enable": True}, **AUDIT, "resolved": {"enable": True}}, True),
])
@pytest.mark.parametrize("treatment", ["failed", "value", "doubly_robust", "masked"])
def test_the_audit_has_the_loops_where_it_is_on(prune, audited, treatment):
    """A coin alone weighs nothing: the estimator hears of it only where the treatment needs it."""
    if not audited and treatment in ("value", "doubly_robust"):
        assert "audit.enable" in refusal({"enable": True, "prune": {**prune, "treatment": treatment}})
        return
    segment = parse({"enable": True, "prune": {**prune, "treatment": treatment}})
    assert (segment.audited, segment.weighted) == (audited, audited and treatment != "failed")
    assert segment.masks == (treatment == "masked") and segment.prunes
    off = config.Segment(prune=segment.prune)  # segment.enable is the main switch
    assert not off.audited and not off.weighted


@pytest.mark.parametrize("treatment", ["failed", "value"])
def test_a_rule_that_predicts_nothing_needs_weights(treatment):
    prune = {"finish_group_after": 3, **AUDIT, "treatment": treatment}
    assert "prune.treatment" in refusal({"enable": True, "prune": prune})
    assert parse({"enable": True, "prune": {**prune, "treatment": "doubly_robust"}}).weighted


@pytest.mark.parametrize("value", [True, False])
def test_the_key_that_the_treatment_replaces_says_so(value):
    line = refusal({"prune": {"repetition": {"enable": True, "keep_row": value}}})
    assert "prune.repetition.keep_row" in line and "prune.treatment=failed" in line and "\n" not in line


def test_nested_values_keep_their_siblings():
    segment = parse({"enable": True, "prune": {"repetition": {"enable": True, "min_span": 99}}})
    assert segment.prune.repetition == config.Repetition(enable=True, min_span=99)
    assert segment.prunes and segment.dmmpt == config.Dmmpt()
    assert not config.Segment(prune=segment.prune).prunes  # segment.enable is the main switch


def test_json_round_trip(monkeypatch):
    segment = parse({"enable": True, "segment_length": 7, "boundary": "yield", "dmmpt": {"enable": True, "tau": 0.5},
                     "prune": {"finish_group_after": 3, "treatment": "masked", **AUDIT}, "success_threshold": 1})
    text = config.to_json(segment)
    assert parse(json.loads(text)) == segment != Segment()
    monkeypatch.setenv(config.ENV_SEGMENT, text)
    assert config.current() == segment
    monkeypatch.delenv(config.ENV_SEGMENT)
    assert config.current() == Segment()
    assert isinstance(segment.success_threshold, float)


def test_frozen():
    segment = parse({})
    for target, name in ((segment, "enable"), (segment.prune, "finish_group_after"), (segment.dmmpt, "tau")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 1)
    assert hash(segment) == hash(Segment())


@pytest.mark.parametrize("values, loss_mode, names", [
    ({}, "vanilla", ""), ({"observe": True}, "vanilla", "observe"), ({"enable": True}, "vanilla", "observe segment"),
    ({"enable": True, "boundary": "yield"}, "vanilla", "observe segment yield"),
    ({"enable": True, "prune": {"repetition": {"enable": True}}}, "pois", "observe segment prune pois"),
    ({"enable": True, "prune": {"finish_group_after": 2, "treatment": "masked", **AUDIT}}, "pois",
     "observe segment prune weighted pois"),
    ({"enable": True, "prune": {"repetition": {"enable": True}, "treatment": "masked", "audit": {"enable": False}}},
     "vanilla", "observe segment prune weighted"),
    ({"dmmpt": {"enable": True}}, "sais", "dmmpt sais"), ({}, "gspo", ""),
])
def test_features(values, loss_mode, names):
    assert config.features(parse(values), loss_mode) == frozenset(names.split())
    assert config.features(parse(values), loss_mode, True) == frozenset([*names.split(), "weighted"])


@pytest.mark.parametrize("value", [True, False])
def test_a_removed_key_is_refused_with_what_it_was(value):
    said = refusal({"enable": True, "prune": {"hopeless": value}})
    assert "\n" not in said and "prune.hopeless" in said and "never pruned anything" in said


@pytest.mark.parametrize("value", [{"enable": True}, {"tail_fraction": 0.5}, {}])
def test_elastic_segments_are_gone_and_their_keys_say_so(value):
    line = refusal({"profile": "elastic", "elastic": value})
    assert f"{PREFIX}.elastic" in line and "\n" not in line
    assert "routing.tail_fraction" in line and "drop it" in line
