"""Registered losses in v0.7.0's legacy actors, pristine and patched.

The FSDP actor updates a tiny model on a CPU; the Megatron actor has a loop for a pipeline and a table for a model.
"""

import pytest

from ci.tests.contract.legacy_actor_answers import DRIFT, ROWS, answers, megatron_answers

pytest.importorskip("verl")
pytestmark = pytest.mark.slow
LENGTH = 5  # of the probe's responses


@pytest.fixture
def seen(forked_python, overlay, tmp_path_factory):
    return answers(forked_python, overlay, tmp_path_factory)


def metric(answer, name):
    values = answer["metrics"][name]
    return sum(values) / len(values)


def test_upstream_drops_what_a_loss_declares(seen):
    """Negative control."""
    assert all(call == {"keys": [], "entropy": False, "old_is_detached_current": False}
               for call in seen["pristine"]["probe"]["seen"])


def test_a_loss_gets_the_columns_it_declares_and_the_entropy(seen):
    calls = seen["patched"]["probe"]["seen"]
    assert calls and all({"token_level_scores", "rm_scores", "acc", "old_log_probs"} <= set(c["keys"]) for c in calls)
    assert all(call["entropy"] and "absent" not in call["keys"] for call in calls)


@pytest.mark.parametrize("case", ["vanilla", "vanilla-one-masked-row", "reinforce"])
def test_other_losses_are_as_upstream_bit_for_bit(seen, case):
    assert seen["pristine"][case] == seen["patched"][case] == seen["alone"][case]


def test_without_the_patch_the_overlay_refuses_and_names_it(seen):
    row = seen["pristine"]["row"]
    assert row["state"] == "INCOMPATIBLE" and "segment-keys-through-legacy-actors" in row["detail"]
    assert "Unsupported loss mode: pois" in seen["pristine"]["pois"]["error"]
    assert seen["patched"]["row"]["state"] == "APPLIED" and seen["patched"]["row"]["version"] == "0.7.0.dev0"


def test_without_the_overlay_a_patched_checkout_knows_no_pois(seen):
    assert "row" not in seen["alone"] and "Unsupported loss mode: pois" in seen["alone"]["pois"]["error"]


@pytest.mark.parametrize("case", ["pois", "pois-on-policy-shortcut"])
def test_pois_has_ratio_one_and_sees_the_rollout_log_probs(seen, case):
    answer = seen["patched"][case]
    # the step is REINFORCE's, although the stored log-probs lie DRIFT above the current ones
    assert answer["weights"] == seen["patched"]["reinforce"]["weights"] != seen["patched"]["vanilla"]["weights"]
    assert metric(answer, "esgrpo/pois/log_kl_rollout_current") == pytest.approx(DRIFT, abs=1e-5)


@pytest.mark.parametrize("case", ["version-on-policy-shortcut", "sais-on-policy-shortcut"])
def test_the_on_policy_shortcut_does_not_hide_the_drift(seen, case):
    """One mini-batch and use_rollout_log_probs=False: the actor passes log_prob.detach() for old_log_prob."""
    assert metric(seen["patched"][case], "actor/ppo_kl") == pytest.approx(DRIFT, abs=1e-5)
    assert metric(seen["patched"][case], "actor/pg_clipfrac") > 0


def test_dmmpt_masks_by_acc_which_differs_from_the_score(seen):
    """tau 0 and a large sigma mask every token of a correct row; acc calls one row of four correct, the score two."""
    assert metric(seen["patched"]["dmmpt"], "esgrpo/dmmpt/masked_fraction") == pytest.approx(1 / ROWS)


@pytest.fixture
def seen_by_megatron(forked_python, overlay, tmp_path_factory):
    return megatron_answers(forked_python, overlay, tmp_path_factory)


def test_the_megatron_actor_hands_over_columns_and_entropy_only_when_patched(seen_by_megatron):
    upstream, patched = (seen_by_megatron[kind]["probe"]["seen"] for kind in ("pristine", "patched"))
    assert upstream and all(call == {"keys": [], "entropy": None} for call in upstream)
    assert all({"token_level_scores", "rm_scores", "acc", "rollout_log_probs"} <= set(c["keys"]) for c in patched)
    assert all(call["entropy"] == [ROWS / 2, LENGTH] and "absent" not in call["keys"] for call in patched)


def test_the_megatron_actors_other_losses_are_as_upstream(seen_by_megatron):
    assert seen_by_megatron["pristine"]["vanilla"] == seen_by_megatron["patched"]["vanilla"]


def test_pois_with_dmmpt_in_the_megatron_actor(seen_by_megatron):
    answer = seen_by_megatron["patched"]["pois"]
    assert metric(answer, "esgrpo/pois/log_kl_rollout_current") == pytest.approx(DRIFT, abs=1e-5)
    assert metric(answer, "esgrpo/dmmpt/masked_fraction") == pytest.approx(1 / ROWS)  # acc, a boolean, decides
    assert "Unsupported loss mode: pois" in seen_by_megatron["pristine"]["pois"]["error"]
