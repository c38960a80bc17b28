"""History, queue and router on verl's real rollouter and router classes, and the same without the hooks."""

import json
from importlib import metadata

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow
CHILD = "ci/tests/contract/routing_classes.py"
LOOKAHEAD, PROMPTS, LONGEST = 6, 12, 8
ON = {"enable": True, "history": {"enable": True}}


@pytest.fixture(scope="module")
def child(root, forked_python, overlay, tmp_path_factory):
    from esgrpo import releases

    named = tmp_path_factory.mktemp("named")  # verl asks for the distribution "vllm", which the CPU wheel is not
    if "vllm" not in {found.metadata["Name"] for found in metadata.distributions()}:
        (named / "vllm.dist-info").mkdir()
        (named / "vllm.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {releases.installed('vllm')}+cpu\n")

    def run(features: str, **sections):
        run_dir = tmp_path_factory.mktemp("run")
        done = forked_python(
            root / CHILD, "hooked", path=(overlay, root, named), cwd=run_dir, ESGRPO_ENABLE="1",
            ESGRPO_DISABLE="prompt-sampler",  # needs a real data loader
            ESGRPO_FEATURES=features, ESGRPO_RUN_DIR=str(run_dir), ESGRPO_SEGMENT=json.dumps({**ON, **sections}))
        return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}

    return run


@pytest.fixture(scope="module")
def routed(child):
    routing = {"enable": True, "lookahead": LOOKAHEAD, "tail_share": 0.25}
    return child("observe,segment,history,routing,tails", routing=routing)


def test_the_hooks_are_in_place(routed):
    assert {slug: state for slug, (state, _) in routed["states"].items()} == dict.fromkeys(
        ("history-saved-at-end", "prompt-forecasts", "prompt-queue", "tail-router", "rollouter-windows"), "APPLIED")


def visits(seen, name="started"):
    """First and second visits of the prompts, each in the order they were generated."""
    first, second = [], []
    for number, value in zip(seen["rollouter"]["started"], seen["rollouter"][name], strict=True):
        (second if any(number == known for known, _ in first) else first).append((number, value))
    return first, second


def order(seen):
    return tuple([number for number, _ in side] for side in visits(seen))


@pytest.mark.parametrize("side", ["seen", "plain"])
def test_every_prompt_is_generated_once_an_epoch_and_sent_before_the_end(routed, side):
    seen = routed[side]["rollouter"]
    assert sorted(seen["started"]) == sorted(2 * list(range(PROMPTS)))
    assert len(set(seen["sent"])) == 2 * PROMPTS and seen["ended"] and seen["left"] == 0


@pytest.mark.hook("prompt-queue")
def test_long_prompts_overtake_once_they_are_known(routed):
    """A new prompt is expected to be as long as the mean: it waits for the long ones, the short ones for it."""
    first, second = order(routed["seen"])
    assert first == list(range(PROMPTS))
    started = routed["seen"]["rollouter"]["started"]
    again = len(started) - 1 - started[::-1].index(LONGEST)
    assert second != first and again < started.index(11)  # its second visit before the first of the last prompt
    metrics = routed["seen"]["rollouter"]["metrics"]
    assert metrics["esgrpo/routing/inversions"] >= 2 and metrics["esgrpo/routing/overtakes"] >= 4


def test_plain_verl_keeps_the_order_of_the_data_set(routed):
    """Negative control."""
    assert routed["plain"]["rollouter"]["started"] == 2 * list(range(PROMPTS))
    assert not any(name.startswith("esgrpo/") for name in routed["plain"]["rollouter"]["metrics"])
    assert routed["plain"]["rollouter"]["prompts"] == 0 and not routed["plain"]["rollouter"]["saved"]


def test_the_prefetch_is_bounded(routed):
    assert routed["seen"]["rollouter"]["depth"] == LOOKAHEAD
    assert routed["plain"]["rollouter"]["depth"] > 2 * LOOKAHEAD  # all there is, up to 128


@pytest.mark.hook("prompt-forecasts")
def test_every_row_gets_the_forecast_as_a_keyword_argument(routed):
    forecasts = routed["seen"]["rollouter"]["forecasts"]
    assert all(len(rows) == 4 and rows[0] == rows[3] and rows[0] is not None for rows in forecasts)
    assert set(forecasts[0][0]) >= {"tokens", "low", "high", "known", "length_class", "alpha", "beta"}
    first, second = (dict(side) for side in visits(routed["seen"], "forecasts"))
    assert not any(rows[0]["known"] for rows in first.values())
    assert all(rows[0]["known"] for rows in second.values())
    # 3 of 4 responses end after 200 tokens, one was pruned after 100: that is not read as its length
    assert 150 < second[LONGEST][0]["tokens"] <= 256 and second[LONGEST][0]["length_class"] == "tail"
    assert second[0][0]["tokens"] < 40
    assert all(row is None for rows in routed["plain"]["rollouter"]["forecasts"] for row in rows)


def test_a_row_that_was_cut_is_as_correct_as_predicted_whatever_its_reward(routed):
    """Two visits of three judged rows each, one of them wrong, and of one that was cut; the first counts 0.8."""
    seen = routed["seen"]["rollouter"]
    counted = [now - before for now, before in zip(seen["posterior"], seen["prior"], strict=True)]
    assert counted == pytest.approx([1.8 * 2.1, 1.8 * 1.9])


@pytest.mark.hook("history-saved-at-end", "rollouter-windows")
def test_the_history_is_saved_and_measured(routed):
    seen = routed["seen"]["rollouter"]
    assert seen["saved"] and seen["prompts"] == PROMPTS == seen["metrics"]["esgrpo/history/prompts"]
    assert seen["metrics"]["esgrpo/history/known_rate"] == 0.5
    assert seen["metrics"]["esgrpo/history/rank_correlation"] > 0
    assert 0 <= seen["metrics"]["esgrpo/history/coverage"] <= 1


def test_the_forecast_does_not_travel_to_the_trainer(routed):
    assert routed["seen"]["rollouter"]["columns"] == ["esgrpo"]


@pytest.mark.hook("tail-router")
def test_a_yield_moves_a_tail_response_to_the_tail_replica(routed):
    seen = routed["seen"]["router"]
    assert seen["class"] == "TailRouter" and seen["fields"] == [["sampling_params"], ["request_id"]]
    assert seen["tail_replicas"] == [1, 0]  # of four, and of the one that is left at the end
    assert set(seen["again"].values()) == {"replica-0"}
    assert len(set(seen["first"][name] for name in seen["again"])) > 1
    assert "replica-0" not in seen["fresh"]
    assert seen["taken"]["moves"] == 3 and seen["taken"]["tail_share"] == 0


def test_plain_verl_leaves_it_where_it_started(routed):
    """Negative control: sticky, and blind to the class."""
    plain = routed["plain"]["router"]
    assert plain["class"] == "GlobalRequestLoadBalancer" and plain["fields"] == [[], []]
    assert plain["again"] == {name: plain["first"][name] for name in plain["again"]}


@pytest.mark.parametrize("side", ["seen", "plain"])
def test_requests_are_counted_like_verls(routed, side):
    assert routed[side]["router"]["left"] == 0
    assert routed[side]["router"]["alone"] == "replica-3"


def test_the_sampler_alone_bounds_the_queue_and_keeps_its_order(child):
    found = child("observe,segment,history,sampler", sampler={"enable": True})
    assert found["states"]["tail-router"][0] == "NOT_NEEDED" and found["states"]["prompt-queue"][0] == "APPLIED"
    assert found["seen"]["rollouter"]["started"] == 2 * list(range(PROMPTS))
    assert found["seen"]["rollouter"]["depth"] == 2  # what runs at once
    assert found["seen"]["rollouter"]["maxsize"] == [128, 2]  # until the replicas are known, verl's own bound


def test_with_everything_off_verls_queue_stays(child):
    found = child("observe,segment", history={"enable": False})
    assert {state for slug, (state, _) in found["states"].items() if slug != "rollouter-windows"} == {"NOT_NEEDED"}
    assert found["seen"]["rollouter"]["depth"] > 2 * LOOKAHEAD and found["seen"]["rollouter"]["maxsize"] == [128, 128]
    assert all(row is None for rows in found["seen"]["rollouter"]["forecasts"] for row in rows)
