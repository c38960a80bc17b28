"""The plan of verl's settings: data from a config that stays as it was, whatever the trainer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

omegaconf = pytest.importorskip("omegaconf")

from esgrpo import config as settings  # noqa: E402
from esgrpo.errors import ConfigError  # noqa: E402
from esgrpo.hooks.verl.run import overlap_rules  # noqa: E402
from esgrpo.hooks.verl.run.config_rules import Plan, features_of, fill, optimizer_steps_per_version  # noqa: E402

ANCHOR = "segment.pois.anchor: auto -> "


def composed(trainer: str, steps: int, **more):
    """The part of verl's config that the rules read, with `steps` optimiser steps between two weight syncs."""
    parts = {"actor_rollout_ref": {
        "actor": {"loss_agg_mode": "token-mean", "ppo_epochs": 1, "policy_loss": {"loss_mode": "pois"},
                  "ppo_mini_batch_size": 8},
        "rollout": {"name": "vllm", "n": 8, "calculate_log_probs": True, "router_config_path": None,
                    "free_cache_engine": False}},
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": True}},
        "data": {"max_response_length": 64, "train_batch_size": 8 * steps}}
    if trainer in ("fully_async", "0.7.0"):
        parts["async_training"] = {"require_batches": 1, "trigger_parameter_sync_step": steps}
        if trainer == "0.7.0":
            parts["async_training"] |= {"compute_prox_log_prob": False, "use_rollout_log_probs": True}
            parts["algorithm"]["rollout_correction"] = None
    else:
        v1 = {"trainer_mode": trainer, "sync": {}, "colocate_async": {"num_warmup_batches": 1},
              "separate_async": {"num_warmup_batches": 1, "parameter_sync_step": steps},
              "sampler": {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}}
        parts["trainer"] = {"use_v1": True, "v1": v1}
    return omegaconf.OmegaConf.merge(omegaconf.OmegaConf.create(parts), more)


def planned(config, **segment) -> Plan:
    parsed = settings.parse({"enable": True, "segment_length": 32, **segment})
    plan = Plan(parsed)
    fill(plan, config, features_of(config, parsed))
    return plan


@pytest.mark.parametrize("trainer, mode, pruning, names", [
    ("fully_async", "token-mean", True, {"observe", "segment", "pois", "prune"}),
    ("fully_async", "seq-mean-token-mean", True, {"observe", "segment", "pois", "prune", "weighted"}),
    ("0.7.0", "seq-mean-token-mean", True, {"observe", "segment", "pois", "prune"}),
    ("separate_async", "seq-mean-token-mean", True, {"observe", "segment", "pois", "prune", "weighted", "v1"}),
    ("sync", "token-mean", False, {"v1", "observe", "segment", "pois"})])
def test_hooks_are_switched_on_by_what_the_loss_and_the_trainer_are(trainer, mode, pruning, names):
    config = composed(trainer, 1, actor_rollout_ref={"actor": {"loss_agg_mode": mode}})
    rules = {"prune": {"repetition": {"enable": pruning}}}
    segment = settings.parse({"enable": True, "segment_length": 32, **rules})
    assert features_of(config, segment) == names
    assert features_of(config, settings.parse({})) - {"pois"} <= {"v1"}


@pytest.mark.parametrize("of_data, given, seed", [(None, 0, 0), (0, 0, 0), (3, 0, 3), (3, 7, 7), (-1, 0, 0)])
def test_random_decisions_follow_the_seed_of_the_data(of_data, given, seed):
    plan = planned(composed("fully_async", 1, data={"seed": of_data}), seed=given)
    assert plan.segment.seed == seed and not any("seed" in line for line in plan.lines)
    settings.parse(json.loads(settings.to_json(plan.segment)))  # workers read it


@pytest.mark.parametrize("trainer, filtered, said", [
    ("sync", False, True), ("sync", True, False), ("colocate_async", False, False), ("separate_async", False, False)])
def test_what_becomes_of_foreseen_groups_is_said_where_nothing_replaces_them(trainer, filtered, said):
    config = composed(trainer, 1, algorithm={"filter_groups": {"enable": filtered}})
    prune = {"resolved": {"enable": True}, "audit": {"enable": True}}
    lines = planned(config, prune=prune).lines
    assert any("not replaced" in line for line in lines) == said
    assert not any("not replaced" in line for line in planned(config).lines)


def test_the_prompt_sampler_is_refused_where_nothing_tells_it_how_prompts_ended():
    sampler = {"sampler": {"enable": True}, "history": {"enable": True}}
    config = composed("0.7.0", 1, data={"shuffle": True})
    with pytest.raises(ConfigError, match="sampler.enable.*0.7.0"):
        planned(config, **sampler)
    planned(composed("fully_async", 1, data={"shuffle": True}), **sampler)


@pytest.mark.parametrize("trainer", ["fully_async", "0.7.0", "sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("steps, anchor", [(1, "token"), (4, "version")])
def test_the_anchor_of_every_trainer(trainer, steps, anchor):
    config = composed(trainer, steps)
    assert optimizer_steps_per_version(config) == steps
    before = omegaconf.OmegaConf.to_container(config)
    plan = planned(config)
    assert plan.segment.pois.anchor == anchor and settings.parse({}).pois.anchor == "auto"
    assert [line for line in plan.lines if f"{ANCHOR}{anchor}, because a weight version has {steps} " in line]
    needs = "async_training.compute_prox_log_prob" if trainer == "0.7.0" else "algorithm.rollout_correction.bypass_mode"
    assert plan.settings == ({} if anchor == "token" else {needs: trainer == "0.7.0"})
    assert omegaconf.OmegaConf.to_container(config) == before and not plan.files


@pytest.mark.parametrize("trainer, bound, older", [
    ("fully_async", 2.0, "async_training.staleness_threshold=2 lets in"), ("fully_async", 0.0, ""),
    ("0.7.0", 0.5, "async_training.staleness_threshold=0.5 lets in"),
    ("separate_async", None, "trainer.v1.trainer_mode=separate_async lets in"),
    ("colocate_async", None, "trainer.v1.trainer_mode=colocate_async lets in"), ("sync", None, "")])
@pytest.mark.parametrize("steps", [1, 4])
def test_pois_is_warned_of_where_rollout_runs_ahead_of_the_weights(trainer, bound, older, steps):
    plan = planned(composed(trainer, steps, **({} if bound is None else
                                               {"async_training": {"staleness_threshold": bound}})))
    said = [line for line in plan.lines if "older weights" in line]
    assert len(said) == bool(older) and all(older in line and "{}" not in line for line in said)


@pytest.mark.parametrize("bypass", [True, False])
def test_pois_under_importance_weights_of_verl_is_corrected_unless_they_are_left_out(bypass):
    correction = {"rollout_is": "token", "bypass_mode": bypass}
    plan = planned(composed("fully_async", 1, algorithm={"rollout_correction": correction},
                            async_training={"staleness_threshold": 2.0}))
    assert any("older weights" in line for line in plan.lines) is bypass


def test_a_batch_that_is_no_multiple_of_the_mini_batch_is_rounded_up():
    """As verl's v1 trainers pad it."""
    assert optimizer_steps_per_version(composed("sync", 1, data={"train_batch_size": 20})) == 3


def test_where_the_log_probs_of_a_version_are_not_to_be_had_the_token_stays_with_a_warning():
    plan = planned(composed("0.7.0", 4, async_training={"use_rollout_log_probs": False}))
    assert plan.segment.pois.anchor == "token" and not plan.settings
    assert "use_rollout_log_probs=False leaves no other" in plan.lines[0] and "nothing clips" in plan.lines[1]


@pytest.mark.parametrize("actor, lost", [
    ({"strategy": "fsdp"}, "actor.strategy=fsdp"),
    ({"strategy": "fsdp2", "fsdp_config": {"param_offload": True}}, ""),
    ({"strategy": "megatron", "megatron": {"param_offload": True}}, "actor.megatron.param_offload=True"),
    ({"strategy": "megatron", "megatron": {"param_offload": False}}, ""), ({"strategy": "fsdp2"}, "")])
def test_weights_that_verl_0_7_0_cannot_keep_are_no_anchor(actor, lost):
    """Nothing would be clipped although the log says so, or updates be undone, or the first step fail."""
    config = composed("0.7.0", 4, actor_rollout_ref={"actor": actor})
    plan = planned(config)
    assert plan.segment.pois.anchor == ("token" if lost else "version")
    assert lost in plan.lines[0] and any("nothing clips" in line for line in plan.lines) is bool(lost)
    if lost:
        with pytest.raises(ConfigError, match=f"pois.anchor: 'version'.*{lost}"):
            planned(config, pois={"anchor": "version"})
    assert planned(composed("fully_async", 4, actor_rollout_ref={"actor": actor})).segment.pois.anchor == "version"


def test_a_v1_mode_that_verl_has_not_is_refused_in_one_line():
    config = composed("sync", 1)
    config.trainer.v1.trainer_mode = "separate-async"
    with pytest.raises(ConfigError, match="trainer.v1.trainer_mode: 'separate-async'"):
        planned(config)


def test_an_anchor_of_the_users_own_stays():
    for anchor in ("token", "version"):
        for steps in (1, 4):
            plan = planned(composed("fully_async", steps), pois={"anchor": anchor})
            assert plan.segment.pois.anchor == anchor and not [line for line in plan.lines if ANCHOR in line]


def test_routing_plans_a_router_only_for_replicas_of_the_tail():
    """Without them verl's own router or the user's stays, and a deterministic one, too."""
    routing = {"history": {"enable": True}, "routing": {"enable": True, "tail_share": 0.0}}
    taken = {"actor_rollout_ref": {"rollout": {"router_config_path": "/my/router.yaml", "full_determinism": True}}}
    plan = planned(composed("fully_async", 1, **taken), **routing)
    assert not plan.files and not plan.settings
    routing["routing"]["tail_share"] = 0.5
    plan = planned(composed("fully_async", 1), **routing)
    (path,) = plan.files
    assert plan.settings == {"actor_rollout_ref.rollout.router_config_path": path}
    assert path == "RUN_DIR/esgrpo/router.yaml" and "tail_share: 0.5" in plan.files[path]
    with pytest.raises(ConfigError, match="/my/router.yaml.*tail_share above 0.*verl mounts one router"):
        planned(composed("fully_async", 1, **taken), **routing)


def test_a_disabled_router_is_not_planned():
    parsed = settings.parse({"enable": True, "segment_length": 32, "history": {"enable": True},
                             "routing": {"enable": True, "tail_share": 0.5}})
    for slug in ("tail-router", "*"):
        plan = Plan(parsed)
        fill(plan, composed("fully_async", 1), settings.features(parsed, "vanilla"), disabled=frozenset({slug}))
        assert not plan.files and not plan.settings


def overlap_lines(override=False, trainer="fully_async", actor=None, **fully_async) -> list[str]:
    """What is said of the overlap control under verl's own values of async_training, but for these."""
    own = {"staleness_threshold": 0.1, "require_batches": 1, "concurrent_samples_per_replica": 16}
    plain = {"policy_loss": {"loss_mode": "vanilla"}, "optim": {"lr_scheduler_type": "constant"}}
    more = {"async_training": {**own, **fully_async}} if trainer in ("fully_async", "0.7.0") else {}
    config = composed(trainer, 4, actor_rollout_ref={"actor": {**plain, **(actor or {})}}, **more)
    overlap = {"enable": True, "override": override}
    lines = planned(config, overlap=overlap).lines
    return [line for line in lines if "overlap.enable" in line]


@pytest.mark.parametrize("given, kept", [
    ({}, []), ({"staleness_threshold": 0.5}, ["staleness"]), ({"require_batches": 2}, ["trigger"]),
    ({"concurrent_samples_per_replica": 8, "staleness_threshold": 1.0}, ["concurrency", "staleness"]),
    ({"use_dynamic_resource_scheduling": True}, ["trigger"]),
    ({"actor": {"policy_loss": {"loss_mode": "pois"}}}, ["trigger"]),
    ({"actor": {"optim": {"lr_scheduler_type": "cosine"}}}, ["trigger"]),
    ({"actor": {"optim": {"lr_warmup_steps_ratio": 0.1}}}, ["trigger"]),
    ({"actor": {"optim": {"lr_decay_style": "linear"}}, "override": True}, ["trigger"]),
    ({"staleness_threshold": 0.5, "override": True}, [])])
def test_the_overlap_control_says_what_it_leaves_alone(given, kept):
    pytest.importorskip("verl")
    lines = overlap_lines(**given)
    assert [line.split()[1] for line in lines] == kept
    assert all("is not moved, because" in line for line in lines)


def test_what_is_on_the_command_line_was_set_by_hand_even_if_it_is_verls_own_value(monkeypatch):
    pytest.importorskip("verl")
    monkeypatch.setattr(overlap_rules, "_command_line", lambda: {"async_training.staleness_threshold"})
    assert [line.split()[1] for line in overlap_lines()] == ["staleness"]


NEVER_IN_V1 = ["concurrency", "trigger"]


@pytest.mark.parametrize("given, override, kept", [
    ({}, False, []), ({"separate_async": {"num_warmup_batches": 2}}, False, ["staleness"]),
    ({"separate_async": {"num_warmup_batches": 2}}, True, []),
    ({"sampler": {"max_off_policy_threshold": 3}}, False, ["max_off_policy_threshold"]),
    ({"sampler": {"max_off_policy_threshold": 3}}, True, []),
    ({"sampler": {"max_off_policy_threshold": None}}, False, []),  # there is nothing to move
    ({"sampler": {"custom_sampler": {"path": "mine.py"}}}, True, ["staleness", "max_off_policy_threshold"])])
def test_of_v1s_separate_async_it_says_what_cannot_be_moved_there_and_what_stays(given, override, kept):
    pytest.importorskip("verl")
    own = {"separate_async": {"hybrid_rollout": {"enable_switch": False}}, "sampler": {"max_off_policy_threshold": 8}}
    config = omegaconf.OmegaConf.merge(composed("separate_async", 4), *({"trainer": {"v1": v1}} for v1 in (own, given)))
    overlap = {"enable": True, "override": override}
    lines = [line for line in planned(config, overlap=overlap).lines if "overlap.enable" in line]
    assert [line.split()[1] for line in lines] == NEVER_IN_V1 + kept
    config.trainer.v1.separate_async.hybrid_rollout.enable_switch = True
    more = [line for line in planned(config, overlap=overlap).lines if line not in lines]
    assert any("when the trainer's replicas are lent stays with verl's" in line for line in more)


@pytest.mark.parametrize("trainer", ["0.7.0", "sync", "colocate_async"])
def test_where_the_overlap_control_has_nothing_to_move_it_says_so(trainer):
    line, = overlap_lines(trainer=trainer)
    assert "nothing is moved" in line


@pytest.mark.parametrize("rule", ["repetition", "verdict"])
def test_rules_that_read_log_probs_have_verl_ask_for_them(rule):
    prune = {rule: {"enable": True}, "audit": {"enable": True}}
    for asked in (False, True):
        config = composed("fully_async", 1, actor_rollout_ref={"rollout": {"calculate_log_probs": asked}})
        plan = planned(config, prune=prune)
        said = [line for line in plan.lines if "calculate_log_probs: False -> True" in line]
        assert len(said) == (not asked) and all(f"prune.{rule}" in line for line in said)
        assert plan.settings.get("actor_rollout_ref.rollout.calculate_log_probs", False) != asked
    with pytest.raises(ConfigError, match="audit.enable.*0.7.0"):
        planned(composed("0.7.0", 1), prune=prune)


AUDIT = {"audit": {"enable": True}}
RESOLVED, LOOPS, VERDICT = ({name: {"enable": True}} for name in ("resolved", "repetition", "verdict"))
MASKED = {"treatment": "masked"}


def audited(rule, **audit):
    return {**rule, "audit": {"enable": True, **audit}}


@pytest.mark.parametrize("prune, n, said", [
    ({**AUDIT, **MASKED, "finish_group_after": 8}, 8, "finish_group_after: 8 .*less than rollout.n = 8"),
    ({**AUDIT, **MASKED, "finish_group_after": 7}, 8, ""),
    (audited(RESOLVED), 2, "rollout.n: 2 .*at least 3"), (audited(RESOLVED), 3, ""), (audited(VERDICT), 2, ""),
    (audited(RESOLVED, max_fraction=0.0), 8, "max_fraction: 0.0 .*at least 0.125"),
    (audited(RESOLVED, max_fraction=0.3333), 3, "max_fraction: 0.3333 .*at least 0.3334"),
    (audited(RESOLVED, max_fraction=0.3334), 3, ""),
    ({**audited(LOOPS, max_fraction=0.1), **MASKED}, 8, "max_fraction: 0.1 "),
    ({**LOOPS, **MASKED, "audit": {"max_fraction": 0.1}}, 8, ""),  # nobody tosses a coin of them
    (audited(LOOPS, max_fraction=0.0), 8, ""),  # a loop whose row is trained costs no sibling
    (audited(RESOLVED, window=60), 8, "max_false_rate: 0.05 .*at least 0.0602 .*window to 73"),
    (audited(RESOLVED, window=73), 8, ""), (audited(RESOLVED, window=60, max_false_rate=0.0602), 8, ""),
    (audited(RESOLVED, max_false_rate=0.0), 8, "max_false_rate: 0.0 .*at least 0.0077"),
    (audited(RESOLVED, max_false_rate=0.0077), 8, ""),
    ({**MASKED, "finish_group_after": 3, **audited({}, max_false_rate=0.0)}, 8, "max_false_rate: 0.0 "),
    (audited(LOOPS, max_false_rate=0.0), 8, ""),  # proven loops go until the first false one
    (audited(VERDICT, max_false_rate=0.0), 8, ""),  # the gate has bounds of its own
    (audited({"verdict": {"enable": True, "check_interval": 64}}), 8, "check_interval: 64 .*less than .* = 64"),
    (audited({"verdict": {"enable": True, "check_interval": 63}}), 8, "")])
def test_a_rule_that_could_never_cut_is_refused(prune, n, said):
    config = composed("fully_async", 1, actor_rollout_ref={"rollout": {"n": n}})
    if not said:
        planned(config, prune=prune)
        return
    with pytest.raises(ConfigError, match=said) as refused:
        planned(config, prune=prune)
    assert str(refused.value).count(" | ") == 3


@pytest.mark.parametrize("n, fraction, said", [(1, 0.5, True), (2, 0.5, False), (8, 0.1, True), (8, 0.125, False)])
def test_verdicts_that_have_nobody_to_cut_are_said(n, fraction, said):
    """A profile has them; it must not stop a run whose prompts get one response."""
    config = composed("fully_async", 1, actor_rollout_ref={"rollout": {"n": n}})
    lines = planned(config, prune=audited(VERDICT, max_fraction=fraction)).lines
    assert any("nothing will be cut" in line for line in lines) == said


@pytest.mark.parametrize("span, interval, response, said", [
    (256, 128, 257, False), (256, 128, 256, True), (256, 200, 400, True), (256, 200, 401, False),
    (256, 5000, 4096, True), (3500, 3000, 6000, True)])
def test_a_look_for_loops_that_no_response_comes_to_is_said(span, interval, response, said):
    """The first look at which a loop can be proven, held against the responses of a book that are one loop."""
    from esgrpo.algo.segments import CONTINUE, SegmentBook

    rule = {"enable": True, "min_span": span, "check_interval": interval}
    config = composed("fully_async", 1, data={"max_response_length": response})
    lines = planned(config, prune=audited({"repetition": rule}))
    assert any("no loop will be found" in line for line in lines.lines) == said
    book = SegmentBook(settings.parse({"enable": True, "segment_length": 1 << 30, "prune": {"repetition": rule}}))
    book.add("a", "g", 0, 0)
    found = False
    for count in range(1, response):  # at its last token it has ended
        if book.advance():
            found = found or book.look("a", [7] * count, (0.0, count)).outcome != CONTINUE
    assert found != said


@pytest.mark.parametrize("loss, refused", [("vanilla", True), ("sais", True), ("pois", False)])
def test_an_anchor_that_no_loss_reads_is_refused(loss, refused):
    config = composed("fully_async", 1, actor_rollout_ref={"actor": {"policy_loss": {"loss_mode": loss}}})
    planned(config)
    if refused:
        with pytest.raises(ConfigError, match="pois.anchor: 'token' .*loss_mode pois"):
            planned(config, pois={"anchor": "token"})
    else:
        assert planned(config, pois={"anchor": "token"}).segment.pois.anchor == "token"


OWN_TRIGGER = {"staleness_threshold": 0.1, "trigger_parameter_sync_step": 4}  # verl's
WITHOUT_A_FILTER = [
    ("0.7.0", {}, "from 0.9.0 on"), ("separate_async", {}, "verl's own filter does it"),
    ("sync", {}, "verl's own filter does it"),
    ("fully_async", {"adv_estimator": "gae"}, "adv_estimator=gae rewards that are alike have a gradient"),
    ("fully_async", {"use_kl_in_reward": True}, "use_kl_in_reward=True rewards that are alike have a gradient")]


@pytest.mark.parametrize("trainer, algorithm, why", WITHOUT_A_FILTER)
def test_where_no_group_can_be_left_out_replace_is_refused_and_spare_is_off_and_says_so(trainer, algorithm, why):
    config = composed(trainer, 1, algorithm=algorithm)
    with pytest.raises(ConfigError, match="null_groups") as refused:
        planned(config, null_groups="replace")
    assert why in str(refused.value)
    plan = planned(config, null_groups="spare")
    said, = (line for line in plan.lines if "null_groups: spare -> train" in line)
    assert why in said and plan.segment.null_groups == "train"


@pytest.mark.parametrize("trainer, on", [("separate_async", False), ("colocate_async", False),
                                         ("colocate_async", True)])
def test_a_v1_run_hears_that_verls_own_filter_is_off(trainer, on):
    config = composed(trainer, 1, algorithm={"filter_groups": {"enable": on, "metric": "acc"}})
    said, = (line for line in planned(config, null_groups="spare").lines if "null_groups: spare -> train" in line)
    assert ("algorithm.filter_groups.enable=True leaves them out" in said) is not on


def test_with_verls_own_filter_separate_async_refills_ahead():
    config = composed("separate_async", 1, algorithm={"filter_groups": {"enable": True, "metric": "acc"}})
    plan = planned(config, null_groups="spare")
    assert plan.segment.null_groups == "spare" and not any("null_groups" in line for line in plan.lines)
    assert "null_groups" in features_of(config, plan.segment)
    with pytest.raises(ConfigError, match="verl's own filter does it"):
        planned(config, null_groups="replace")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg"])
def test_the_filter_stays_with_estimators_that_compare_within_a_group(estimator):
    plan = planned(composed("fully_async", 1, async_training=OWN_TRIGGER, algorithm={"adv_estimator": estimator}),
                   null_groups="spare")
    assert plan.segment.null_groups == "spare" and not any("null_groups: " in line for line in plan.lines)


@pytest.mark.parametrize("trainer, mode, said", [
    ("fully_async", "train", True), ("fully_async", "spare", True), ("fully_async", "replace", False),
    ("sync", "train", False)])
def test_a_group_filter_that_verl_ignores_is_told(trainer, mode, said):
    own = {"async_training": OWN_TRIGGER} if trainer == "fully_async" else {}
    config = composed(trainer, 1, algorithm={"filter_groups": {"enable": True}}, **own)
    lines = planned(config, null_groups=mode).lines
    assert any("does nothing in verl's fully async loop" in line for line in lines) == said
    quiet = planned(composed(trainer, 1, **own), null_groups=mode).lines
    assert not any("filter_groups" in line for line in quiet)


@pytest.mark.parametrize("bound, batches, mode, overlap, said", [
    (0.5, 1, "spare", False, True), (1.0, 1, "spare", False, False), (0.5, 2, "spare", False, False),
    (0.5, 1, "replace", False, False), (0.5, 1, "spare", True, False)])
def test_a_filter_that_no_batch_ever_waits_for_is_told(bound, batches, mode, overlap, said):
    config = composed("fully_async", 1, async_training={"staleness_threshold": bound,
                                                        "trigger_parameter_sync_step": batches})
    lines = planned(config, null_groups=mode, overlap={"enable": overlap}).lines
    assert any("will hardly leave a group out" in line for line in lines) == said


POOL = "reward.reward_model.enable_resource_pool"
AUDIT = {"audit": {"enable": True}}
DECIDES_BY_REWARDS = [
    ("prune.verdict.enable", {"prune": {"verdict": {"enable": True}, **AUDIT}}),
    ("prune.resolved.enable", {"prune": {"resolved": {"enable": True}, **AUDIT}}),
    ("prune.finish_group_after", {"prune": {"finish_group_after": 4, "treatment": "masked", **AUDIT}}),
    ("prune.audit.enable", {"prune": {"repetition": {"enable": True, "min_span": 64}, **AUDIT}}),
    ("sampler.enable", {"sampler": {"enable": True}, "history": {"enable": True}}),
    ("prune.treatment", {"profile": "elastic", "prune": {"treatment": "value"}})]


def rewarded(trainer: str, colocated: bool, model: bool = True, **more):
    reward = {"reward_model": {"enable": model, "enable_resource_pool": not colocated}}
    return composed(trainer, 1, reward=reward, **{"data": {"shuffle": True}, **more})


@pytest.mark.parametrize("trainer", ["sync", "colocate_async"])
@pytest.mark.parametrize("key, segment", DECIDES_BY_REWARDS)
def test_what_decides_by_rewards_is_refused_where_these_come_after_sampling(trainer, key, segment):
    with pytest.raises(ConfigError) as refused:
        planned(rewarded(trainer, True), **segment)
    said = str(refused.value)
    assert said.startswith(f"esgrpo: {settings.PREFIX}.{key}: ") and f"set {POOL}=True" in said
    for config in (rewarded(trainer, False), rewarded(trainer, True, model=False)):
        assert not any(POOL in line for line in planned(config, **segment).lines)


def test_what_a_profile_switched_on_is_off_and_says_so_where_rewards_come_after_sampling():
    plan = planned(rewarded("colocate_async", True), profile="elastic", sampler={"choice": "thompson"})
    found = plan.segment
    assert not (found.prune.verdict.enable or found.prune.audit.enable or found.sampler.enable or found.audited)
    assert found.prune.repetition.enable and found.routing.enable and found.history.enable
    for key in ("prune.verdict.enable", "prune.audit.enable", "sampler.enable"):
        said, = (line for line in plan.lines if line.startswith(f"{settings.PREFIX}.{key}: True -> False, because "))
        assert f"{POOL}=True" in said
    assert sum("history.enable: lengths" in line for line in plan.lines) == 1
    loops, = (line for line in plan.lines if "prune.repetition: nothing measures" in line)
    assert f"prune.audit.enable=True and {POOL}=True" in loops
    assert settings.parse(json.loads(settings.to_json(found)), 64) == found  # as every other process reads it
    plan = planned(rewarded("colocate_async", False), profile="elastic")
    assert plan.segment.prune.verdict.enable and plan.segment.sampler.enable and not any(POOL in x for x in plan.lines)


def test_a_switch_of_the_profile_that_the_user_names_is_by_hand():
    segment = {"prune": {"verdict": {"enable": True}}}
    config = rewarded("sync", True, actor_rollout_ref={"rollout": {"segment": segment}})
    with pytest.raises(ConfigError, match="prune.verdict.enable"):
        planned(config, profile="elastic", **segment)


def test_what_needs_no_reward_stays_with_a_colocated_reward_model():
    plan = planned(rewarded("sync", True), prune={"repetition": {"enable": True, "min_span": 64}})
    assert plan.segment.prune.repetition.enable
    assert planned(rewarded("sync", True)).lines == planned(rewarded("sync", False)).lines


def test_verl_itself_refuses_a_colocated_reward_model_where_no_rule_of_ours_has_to():
    """Negative control: the handles that are None, and the trainers whose assertions keep it out."""
    place = importlib.util.find_spec("verl")
    if place is None:
        pytest.skip("needs verl")
    root = Path(place.origin).parent
    handles = (root / "experimental/reward_loop/reward_loop.py").read_text()
    assert "if not self.config.reward.reward_model.enable or self.config.reward.reward_model.enable_resource_pool:\n" \
           "            return self.reward_loop_workers\n        return None" in handles
    for file in ("trainer/ppo/v1/trainer_separate_async.py",
                 "experimental/fully_async_policy/fully_async_rollouter.py"):
        assert "config.reward.reward_model.enable_resource_pool, (" in (root / file).read_text()
