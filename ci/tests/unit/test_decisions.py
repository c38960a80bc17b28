"""What each module decided, why one decided nothing, and that both stand in records, metrics, status and tables."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from bench.common import compare
from ci.tests.property.rollout_fakes import new_driver, seat_of
from esgrpo import cli, config, records
from esgrpo.algo import decisions, rollout
from esgrpo.algo.decisions import Run, of_rows, table
from esgrpo.algo.history import PromptHistory
from esgrpo.algo.prompt_sampling import PromptSampler
from esgrpo.algo.routing_order import inversions, longest_first
from esgrpo.algo.rows import Decisions
from esgrpo.call import wrapped
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.groups import rollout_driver
from esgrpo.hooks.verl.metrics import decision_counts
from esgrpo.hooks.verl.server import token_outputs
from esgrpo.tools import decided

ON = {"enable": True, "history": {"enable": True}}
ROUTING = {**ON, "routing": {"enable": True}}
TAILS = {**ON, "routing": {"enable": True, "tail_share": 0.25}}
GROUPS = {"enable": True, "prune": {"resolved": {"enable": True}, "audit": {"enable": True}}}
SPARE = {"enable": True, "null_groups": "spare"}
LOOPS = {"enable": True, "prune": {"repetition": {"enable": True}, "audit": {"enable": True}}}
VERDICTS = {"enable": True, "prune": {"verdict": {"enable": True}, "audit": {"enable": True}}}
SAMPLER = {**ON, "sampler": {"enable": True}}
KEEP = {"enable": True, "sync": {"requests": "keep"}}
OVERLAP = {"enable": True, "overlap": {"enable": True}}
GATE = {"responses": 700, "needed_responses": 500, "shut": "no better than length"}
REPORT = {"false_rate": 0.0, "false_rate_bound": 0.02, "outcomes": 100, "needed": 73}


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch):
    for name, empty in (("counts", Counter()), ("_written", {}), ("_tracked", decisions.Gathered())):
        monkeypatch.setattr(decision_counts, name, empty)


def row_of(module: str, settings: dict, counts: dict = {}, **facts) -> decisions.Row:  # noqa: B006
    found = {row.module: row for row in table(Run(config.parse(settings), Counter(counts), **facts))}
    assert tuple(found) == decisions.NAMES
    return found[module]


@pytest.mark.parametrize("module, settings, counts, facts, reason", [
    ("routing", ROUTING, {}, {}, "no prompt was begun"),
    ("routing", ROUTING, {"routing/pops": 12}, {"trainer": "fully_async"}, "first epoch: none of 12 prompts was seen"),
    ("routing", ROUTING, {"routing/pops": 12, "routing/known": 9}, {}, "no queue: prompts start at once"),
    ("routing", ROUTING, {"routing/pops": 12, "routing/known": 9, "routing/choices": 3}, {"trainer": "sync"},
     "the longest was always the oldest"),
    ("routing", ROUTING, {}, {"trainer": "colocate_async"}, "colocate_async begins a prompt when another one ends"),
    ("routing", ROUTING, {}, {"trainer": decisions.RECIPE}, "verl 0.7.0: prompts stay in order"),
    ("routing", TAILS, {}, {"replicas": 1}, "one replica"),
    ("segments", TAILS, {}, {"replicas": 1}, "one replica"),
    ("segments", {"enable": True, "boundary": "yield"}, {}, {}, "no response reached a boundary"),
    ("loops", LOOPS, {}, {}, "no loop was proven"),
    ("loops", LOOPS, {}, {"response_length": 128}, "min_span=256 is more than a response may have, 128 tokens"),
    ("loops", LOOPS, {"loops/exempted": 2, "loops/passed_by": 1}, {}, "the audit let all 3 proven loops run"),
    ("loops", LOOPS, {"loops/exempted": 1}, {}, "the audit let the only proven loop run"),
    ("pruning", GROUPS, {}, {}, "no candidate"),
    ("pruning", GROUPS, {"pruning/exempted": 20}, {"audit": {"resolved": {**REPORT, "outcomes": 12}}},
     "not enough exempted outcomes: 12 of 73"),
    ("pruning", GROUPS, {"pruning/exempted": 99}, {"audit": {"resolved": {**REPORT, "false_rate_bound": 0.12}}},
     "the false-prune rate may be 0.12, above audit.max_false_rate=0.05"),
    ("pruning", GROUPS, {"pruning/exempted": 99}, {"audit": {"resolved": REPORT}}, "let all 99 candidates run"),
    ("replaced", GROUPS, {}, {}, "nothing was pruned"),
    ("replaced", GROUPS, {"pruning/pruned": 4}, {}, "each pruned group kept a gradient"),
    ("replaced", SPARE, {}, {}, "0 groups had no gradient"),
    ("replaced", SPARE, {"replaced/null": 4}, {}, "4 groups had no gradient, and there were not enough others"),
    ("replaced", GROUPS, {"pruning/pruned": 4}, {"trainer": "sync"}, "trainer_mode=sync submits another prompt"),
    ("verdicts", VERDICTS, {}, {}, "no response was looked at"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9}, {}, "9 looks, but no weight sync"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9}, {"audit": {"verdict": {**GATE, "responses": 3}}},
     "3 of 500 responses"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9}, {"audit": {"verdict": GATE}}, "stayed shut: no better than length"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9}, {"audit": {"verdict": {**GATE, "shut": ""}}}, "since it would open"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9, "verdicts/gate_open": 1}, {}, "no candidate"),
    ("verdicts", VERDICTS, {"verdicts/looks": 9, "verdicts/gate_open": 1, "verdicts/exempted": 2}, {},
     "all 2 candidates"),
    ("segments", TAILS, {}, {"replicas": 2}, "no response reached a boundary"),
    ("sampler", SAMPLER, {}, {}, "no prompt was taken"),
    ("sampler", SAMPLER, {"sampler/takes": 1, "sampler/unseen": 1}, {}, "first epoch: none of 1 prompt was seen"),
    ("sampler", SAMPLER, {"sampler/takes": 8, "sampler/unseen": 5}, {}, "no candidate promised more"),
    ("keep", KEEP, {}, {}, "no weight sync"),
    ("keep", KEEP, {"keep/syncs": 3}, {"trainer": "fully_async"}, "no weight sync while requests ran"),
    ("keep", KEEP, {"keep/syncs": 3, "keep/aborted": 7}, {}, "7 requests aborted instead"),
    ("keep", KEEP, {"keep/syncs": 3}, {"trainer": "sync"}, "sync has no standalone replicas"),
    ("keep", KEEP, {}, {"trainer": decisions.RECIPE}, "its servers cancel requests by themselves"),
    ("kv_headroom", {"enable": True, "kv_headroom": 0.05}, {}, {}, "no weight sync"),
    ("kv_headroom", {"enable": True, "kv_headroom": 0.05}, {"keep/syncs": 2}, {}, "the KV cache had room"),
    ("overlap", OVERLAP, {}, {}, "no weight version ended"),
    ("overlap", OVERLAP, {"overlap/versions": 1}, {"trainer": "fully_async"}, "rates were missing in 1 weight version"),
    ("overlap", OVERLAP, {"overlap/versions": 4, "overlap/measured": 3}, {"fixed": ("staleness",)},
     "in 4 weight versions no setting within reach promised more"),
    ("overlap", OVERLAP, {}, {"trainer": "sync"}, "sync: its settings are not moved"),
    ("token_outputs", {"observe": True, "token_outputs": True}, {}, {}, "no request was counted"),
    ("token_outputs", {"observe": True, "token_outputs": True}, {"token_outputs/with_text": 3}, {}, "stop strings"),
    ("token_outputs", {"observe": True, "token_outputs": True}, {}, {"trainer": decisions.RECIPE}, "verl 0.7.0"),
])
def test_a_module_that_is_on_and_decided_nothing_says_why(module, settings, counts, facts, reason):
    row = row_of(module, settings, counts, **facts)
    assert row.on and row.decided == 0 and reason in row.reason, row.reason
    named = next(one for one in decisions.MODULES if one.name == module).counted[0]
    decided = row_of(module, settings, {**counts, named: 5}, **facts)
    assert (decided.on, decided.decided, bool(decided.reason)) == (True, 5, module == "verdicts")
    assert not row_of(module, {"observe": True}, counts, **facts).reason  # off: there is nothing to explain


def test_verdicts_say_what_became_of_candidates_and_of_the_gate():
    counts = {f"verdicts/{name}": number for name, number in {
        "looks": 90, "pruned": 4, "exempted": 3, "false": 1, "let_go": 2, "gate_open": 5, "gate_shut": 6}.items()}
    for gate, said in (({"open": True}, "now open"), ({"open": False, "shut": "false cuts"}, "now shut: false cuts")):
        assert row_of("verdicts", VERDICTS, counts, audit={"verdict": gate}).reason == (
            "90 looks; 4 cut, 3 spared by the coin (1 of them right), 2 let go; gate open at 5 of 11 questions of "
                "workers, "
            + said)


def test_overlap_control_under_v1_says_what_it_cannot_move():
    counts = {"overlap/versions": 4, "overlap/measured": 3}
    row = row_of("overlap", OVERLAP, {**counts, "overlap/moves": 5}, trainer=decisions.SEPARATE)
    assert row.decided == 5 and "v1 has no bound on prompts in flight" in row.reason
    row = row_of("overlap", OVERLAP, counts, trainer=decisions.SEPARATE, fixed=("staleness",))
    assert row.reason.startswith("separate_async: prompts in process stay")


@pytest.mark.parametrize("profile", list(config.PROFILES))
def test_no_profile_needs_weights(profile):
    assert not config.parse({"profile": profile}).weighted, "they are biased under verl's default estimator"


def test_a_longer_one_first_is_an_inversion():
    assert inversions(longest_first(range(4), [1, 1, 1, 1])) == 0
    assert inversions(longest_first(range(4), [1, 4, 2, 3])) == 3 and inversions([1, 0]) == 1 and inversions([]) == 0


def test_the_sampler_decides_once_candidates_differ():
    import random

    settings = config.parse({**SAMPLER, "sampler": {"enable": True, "uniform": 0.0, "candidates": 64}})
    history = PromptHistory(settings.history, settings.routing, budget=100)
    sampler = PromptSampler(settings.sampler, history, random.Random(0), 40, str, 8)
    for _ in range(3):
        sampler.take(0)
    assert sampler.take_counts() == {"takes": 3, "unseen": 3, "by_text": 0, "chosen": 0}
    for number in range(20):
        history.observe(str(number), [5] * 8, [True, False] * 4, [False] * 8, version=1)
    for _ in range(3):
        sampler.take(1)
    counts = sampler.take_counts()
    assert counts["chosen"] == 3 and sampler.take_counts() == {"takes": 0, "unseen": 0, "by_text": 0, "chosen": 0}


def test_without_text_is_counted_for_the_next_window():
    server = SimpleNamespace()
    for changed in (True, False, True):
        token_outputs.count(server, changed)
    decision_counts.add_windows([{"kept": 3, "outcomes": {"abort": 1}, **token_outputs.take_counts(server)},
                                 {"kept": 0, "outcomes": {}}])
    assert +decision_counts.counts == {"keep/kept": 3, "keep/aborted": 1, "keep/syncs": 2, "token_outputs/responses": 2,
                                       "token_outputs/with_text": 1}


def on(rows) -> dict[str, int]:
    return {row.module: row.decided for row in rows if row.on}


def worker_run(tmp_path, monkeypatch, **segment) -> tuple[rollout_driver.Driver, list[dict]]:
    """A worker whose group of two hands one response back once, and whose engine prunes the other one as a loop."""
    settings = config.parse({"enable": True, "boundary": "yield", "prune": {"repetition": {"enable": True}}, **segment})
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(settings))
    records.write(Decisions(process="driver", settings=json.loads(config.to_json(settings)),
                            facts={"trainer": "fully_async", "replicas": 2}))
    book = {"spans": [[0, 4]], "boundaries": 1, "logprob_sum": 0.0, "replica": "r", "arrived": 0.0}

    async def run():
        driver = new_driver()
        seats = [seat_of(driver, size=2) for _ in range(2)]
        for seat, outcome, rule in ((seats[0], "yield", "boundary"), (seats[0], "finish", ""),
                                    (seats[1], "prune", "repetition")):
            seat.on(rollout.AttemptEnded, now=1.0, tokens=4, left=20, answer={**book, "outcome": outcome, "rule": rule})
        return driver, [rollout_driver.row_of(seat.on(rollout.MemberEnded, now=2.0, score=1.0), driver).row()
                        for seat in seats]

    return asyncio.run(run())


def test_a_group_that_is_over_leaves_one_row_and_status_prints_it(tmp_path, monkeypatch, capsys):
    driver, rows = worker_run(tmp_path, monkeypatch)
    counts = {"segments/resubmitted": 1, "loops/pruned": 1}
    assert [row["decisions"] for row in rows] == [counts, {**counts, "treated/failed": 1}]
    (written,) = [row for row in records.read(str(tmp_path), "decisions") if row["process"] == "agent-loop-worker"]
    assert written["counts"] == dict(driver.decisions)
    driver._note()  # nothing has changed
    assert len(records.read(str(tmp_path), "decisions")) == 2
    (tmp_path / "hooks.json").write_text(json.dumps([{"process": "driver", "host": "h", "pid": 1, "hooks": []}]))
    assert cli.main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert next(line for line in said if line.startswith("segments")).split()[-2:] == ["on", "1"]
    assert next(line for line in said if line.startswith("keep")).split() == ["keep", "off", "(sync.requests=keep)"]
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    modules = {row["module"]: row for row in json.loads(capsys.readouterr().out)["modules"]}
    assert modules["loops"] == {"module": "loops", "switch": "prune.repetition.enable", "on": True, "decided": 1,
                                "reason": ""}
    assert on(decided.of_directory(str(tmp_path))) == {"segments": 1, "loops": 1}


def test_a_loop_that_an_agent_loop_goes_on_after_stays_cut_and_counts_once():
    settings = config.parse({"enable": True, "prune": {"repetition": {"enable": True}}})
    runs = rollout.GroupRuns(rollout.Rules(settings, 1024, None))
    runs.on(rollout.Submitted("g", 1, 0.0))
    for outcome, rule, tokens in (("prune", "repetition", 300), ("finish", "", 50), ("prune", "repetition", 300)):
        runs.on(rollout.AttemptEnded("g", 0, 1.0, tokens, 500, answer={
            "replica": "r", "arrived": 0.5, "boundaries": 0, "logprob_sum": 0.0, "outcome": outcome, "rule": rule,
            "spans": [[1, tokens]]}))
    (recorded,) = runs.on(rollout.MemberEnded("g", 0, 2.0, 0.0))
    assert (recorded.row.outcome, recorded.row.rule, recorded.row.tokens) == ("prune", "repetition", 650)
    assert +runs.rules.decisions == {"loops/pruned": 1, "treated/failed": 1}


@pytest.mark.parametrize("below", ["runs", "esgrpo"])  # the second is the name of a run's folder of records, too
def test_status_of_a_comparison_shows_each_of_its_runs(tmp_path, monkeypatch, capsys, below):
    tmp_path /= below
    hook = {"slug": "a-hook", "detail": "", "needed": True}
    for name, state in (("plain", "APPLIED"), ("overlay", "FAILED")):
        (tmp_path / name / "esgrpo").mkdir(parents=True)
        (tmp_path / name / "esgrpo" / "hooks.json").write_text(json.dumps(
            [{"process": "driver", "host": "h", "pid": 1, "hooks": [{**hook, "state": state}]}]))
    (tmp_path / "data").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 1  # one of them has a hook that failed
    said = capsys.readouterr().out
    assert said.index(f"{tmp_path}/overlay") < said.index("FAILED") < said.index(f"{tmp_path}/plain")
    assert cli.main(["status", str(tmp_path), "--json"]) == 1
    assert set(json.loads(capsys.readouterr().out)) == {"plain", "overlay"}
    assert cli.main(["status", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert cli.main(["status", str(tmp_path / "data")]) == 2 and "has no esgrpo/hooks.json" in capsys.readouterr().err


def test_the_folder_of_a_runs_records_is_taken_for_the_run(tmp_path, monkeypatch, capsys):
    worker_run(tmp_path, monkeypatch)
    records.flush()
    folder = tmp_path / records.FOLDER
    (folder / records.HOOKS).write_text(json.dumps([{"process": "driver", "host": "h", "pid": 1, "hooks": []}]))
    said = []
    for where in (tmp_path, folder):
        assert cli.main(["status", str(where)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "not recorded" not in said[1]


def test_another_run_in_the_same_directory_is_not_counted_and_restarts_are(tmp_path, monkeypatch):
    for run, restart in (("old", 0), ("new", 0), ("new", 1)):
        monkeypatch.setenv(records.ENV_RUN_ID, run)
        monkeypatch.setenv(records.ENV_RESTART, str(restart))
        monkeypatch.setattr(decision_counts, "_written", {})
        worker_run(tmp_path, monkeypatch)
    assert on(decided.of_directory(str(tmp_path))) == {"segments": 2, "loops": 2}


@pytest.mark.parametrize("segment, expected", [
    (json.dumps({"enable": True, "sync": {"requests": "keep"}}), {"keep"}), (None, None),
    (json.dumps({"enable": True, "elastic": {"enable": False}, "sync": {"requests": "keep"}}), {"keep"}),
    (json.dumps({"prune": {"hopeless": {"enable": True}}}), None)])
def test_a_run_of_an_older_release_has_nothing_recorded(tmp_path, capsys, segment, expected):
    (tmp_path / "hooks.json").write_text(json.dumps([{"process": "driver", "host": "h", "pid": 1, "hooks": [],
                                                      "segment": segment}]))
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "not recorded" in capsys.readouterr().out
    rows = decided.of_directory(str(tmp_path), json.loads((tmp_path / "hooks.json").read_text()))
    assert {row.module for row in rows if row.on} == (expected or set())
    assert all(row.decided is None and row.reason == "not recorded" for row in rows)


def test_the_trainer_hears_of_workers_by_their_rows_and_once_a_version(tmp_path, monkeypatch):
    _, rows = worker_run(tmp_path, monkeypatch)
    before = [{**row, "restart": row["restart"] - 1, "decisions": {"segments/yielded": 5000}} for row in rows]
    assert decision_counts.of_trainer(rows[:1], False) == {}  # the first of two batches
    # a group that a restart brought back whole was counted in the start that made it
    assert decision_counts.of_trainer(rows + before, True) == {"esgrpo/decisions/segments": 1.0,
                                                               "esgrpo/decisions/loops": 1.0}
    assert decision_counts.of_trainer(rows, False) == {}
    assert decision_counts.of_trainer(rows, True) == {"esgrpo/decisions/segments": 0.0, "esgrpo/decisions/loops": 0.0}
    assert decision_counts.of_trainer([{"tokens": 1}], False) == {}  # not made by this overlay's workers


def test_one_process_under_v1_reports_for_all(monkeypatch):
    # where verl filters groups itself, the driver takes ours back
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({"profile": "elastic", "null_groups": "train"}))
    decision_counts.add("routing", inversions=4)
    decision_counts.add_windows([{"kept": 3, "outcomes": {}, "held": 5}])
    found = decision_counts.of_v1(SimpleNamespace(), [])
    assert found == {f"esgrpo/decisions/{name}": number for name, number in (
        ("routing", 4.0), ("loops", 0.0), ("verdicts", 0.0), ("sampler", 0.0), ("keep", 3.0), ("kv_headroom", 5.0),
        ("token_outputs", 0.0))}
    assert set(decision_counts.of_rollouter(SimpleNamespace())) == {
        f"esgrpo/decisions/{name}" for name in ("routing", "sampler", "keep", "kv_headroom", "token_outputs")}


def test_the_table_of_a_comparison_has_a_row_for_each_module_that_was_on():
    def result(name, modules):
        known = {"name": name, "evaluations": [], "lengths": [], "states": {}, "balance": Counter(), "target": 0.6,
                 "bubble": Counter(), "seconds": 1.0, "decoded": 0, "effective_per_s": 0.0, "tail_ratio": 1.0,
                 "modules": modules}
        return SimpleNamespace(**{**dict.fromkeys(compare.Result.__dataclass_fields__), **known})

    plain = [decisions.Row(name, "", False, 0) for name in ("keep", "loops", "routing")]
    ours = [decisions.Row("keep", "", True, 4), decisions.Row("loops", "", True, 0, "no loop was proven"), plain[2]]
    table = compare.table([result("plain", plain), result("overlay", ours), result("older", [])])
    assert [row for row in table if row[0].startswith("decisions: ")] == [
        ["decisions: keep", "off", "4", "not recorded"],
        ["decisions: loops", "off", "0: no loop was proven", "not recorded"]]


def test_rows_that_come_twice_or_late_change_nothing():
    row = {"process": "agent-loop-worker", "node": "n", "pid": 1, "restart": 0}
    late = [{**row, "counts": {"keep/kept": 5}, "audit": {"resolved": REPORT}}, {**row, "counts": {"keep/kept": 2}}]
    assert of_rows(late) == ({"keep/kept": 5}, {"resolved": REPORT})


def test_the_driver_names_the_trainer_and_its_batches():
    omegaconf = pytest.importorskip("omegaconf")
    from esgrpo.hooks.verl.run.driver_start import _trainer

    def facts(**config):
        return tuple(_trainer(omegaconf.OmegaConf.create({"trainer": {}, **config})).values())

    assert facts(async_training={"trigger_parameter_sync_step": 4}) == ("fully_async", 4)
    assert facts(async_training={"trigger_parameter_sync_step": 4, "compute_prox_log_prob": False}) == (
        decisions.RECIPE, 4)
    assert facts(trainer={"use_v1": True, "v1": {"trainer_mode": "colocate_async"}}) == ("colocate_async", 1)


def test_a_window_takes_along_what_its_server_counted(monkeypatch):
    from esgrpo.hooks.verl.server import control_methods
    from esgrpo.hooks.verl.sync import weight_version

    async def engine_call(server, name, version):
        return [{"version": version}]

    async def original(self):
        self.global_steps = 3

    monkeypatch.setattr(control_methods, "engine_call", engine_call)
    server = SimpleNamespace(rollout_mode=SimpleNamespace(name="STANDALONE"))
    token_outputs.count(server, True)
    for _ in range(2):
        asyncio.run(wrapped(weight_version, original)(server))
    first, second = owned.of(server, owned.Server).windows
    assert first["version"] == second["version"] == 3 and "token_outputs" not in second
    assert first["token_outputs"] == {"responses": 1, "with_text": 0}
