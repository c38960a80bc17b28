"""esgrpo explain: nothing that the overlay emits is without an explanation, and a log is read for what it says."""

import ast
import dataclasses
import gzip
import re
import string
from pathlib import Path

import pytest

from esgrpo import cli, compat
from esgrpo.algo import accounting, calibration, carry_over, decisions, prompt_sampling, pruned_rows, routing
from esgrpo.hooks.verl.metrics import trained_rows
from esgrpo.tools.explain import report

OVERLAY = Path(report.__file__).resolve().parents[2]
FIELDS = {"means", "formula", "where", "healthy", "change"}
# the statistics that the issue quotes, as Ray prints them
NOTES = "\n".join(f"(FullyAsyncRollouter pid=2089415)  '{name}': {value}," for name, value in {
    "count/current_param_version": 0, "count/dropped_stale_samples": 0, "count/staleness_samples": 99,
    "count/total_generated_samples": 66, "monitor/active_tasks_size": 32, "monitor/queue/cancel_queue_size": 0,
    "monitor/queue/mq_queue_size": 2, "monitor/queue/pending_queue_size": 128, "monitor/queue/result_queue_size": 0,
    "static/max_concurrent_samples": 32, "static/max_queue_size": 307, "static/max_required_samples": 307,
    "static/required_samples": 64, "static/staleness_threshold": 0.2}.items())


def emitted() -> set[str]:
    """Every string in the overlay that starts with esgrpo/, expressions in it as {}."""
    found = set()
    for file in OVERLAY.rglob("*.py"):
        if "explain" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            else:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"esgrpo/[\w/{}]*[\w}]", text):
                found.add(text)
    row = {"outcome": "finish", "spans": [], "started": 0, "ended": 1, "pruned": False, "trained": True,
           "gradient": True, "tokens": 1,
           "reprefill": 0, "attempts": 1, "boundaries": 0}
    of_batches = set(accounting.batch_metrics([row])) | {
        key for key in keys_of(trained_rows, "metrics") if "/" in key}  # these are put together from the prefix alone
    return found - {"esgrpo/{}"} | {f"esgrpo/{name}" for name in of_batches}


def test_every_name_in_the_source_is_explained():
    names = emitted()
    assert {"esgrpo/tail_ratio", "esgrpo/carry/{}", "esgrpo/history/{}"} <= names  # it does find them
    explained = {name for pattern in report.load() for name in report.expand(pattern)}
    for name in names:
        shape = re.escape(name).replace(r"\{\}", ".+")
        assert any(re.fullmatch(shape, known) for known in explained), f"{name} is not in metrics.toml"


def members() -> dict[str, set[str]]:
    """What the code that fills the {} returns, by prefix: from the code itself, run once."""
    row = {"tokens": 1, "reprefill": 0, "outcome": "prune", "rule": "repetition", "candidate_rule": "", "exempted": 0,
           "keep_probability": 1.0, "candidate": 0, "tokens_at_decision": 1,
           "audit": {"false_rate": 0.0, "false_rate_bound": 1.0, "outcomes": 1}}
    load = routing.ClassLoad(lambda: 1.0)
    return {
        "esgrpo/bubble/": set(accounting.bubble([])) - {"bubble_rate"},
        "esgrpo/sync/": set(accounting.sync_counts([])),
        "esgrpo/prune/": set(pruned_rows.prune_report([row])),
        "esgrpo/length_bias/": set(pruned_rows.length_bias([row])),
        "esgrpo/routing/": set(load.take_metrics()) | set(routing_counts()) | {"tail_replicas", "tail_share"},
        "esgrpo/carry/": {field.name for field in dataclasses.fields(carry_over.Step)} | {"partial"},
        "esgrpo/sampler/": keys_of(prompt_sampling, "metrics"),
        "esgrpo/decisions/": set(decisions.NAMES),
        "esgrpo/history/": keys_of(calibration, "metrics") | {"prompts"},
    }


def keys_of(module, function: str) -> set[str]:
    """Constant keys of the dicts that a function builds."""
    tree = ast.parse(Path(module.__file__).read_text())
    (node,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    keys = {key.value for n in ast.walk(node) if isinstance(n, ast.Dict) for key in n.keys if key is not None}
    return keys | {n.slice.value for n in ast.walk(node)
                   if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
                   and isinstance(n.slice.value, str)}


def routing_counts() -> set[str]:
    return keys_of(routing, "take_counts")


@pytest.mark.parametrize("prefix", sorted(members()))
def test_every_member_of_a_family_is_explained(prefix):
    names = members()[prefix]
    assert names, prefix
    assert [name for name in names if report.find(prefix + name) is None] == []
    assert report.find(prefix + "made/up") is None  # negative control


@pytest.mark.parametrize("pattern", sorted(report.load()))
def test_entries_are_complete(pattern):
    entry = report.load()[pattern]
    chinese = {f"{name}_zh" for name in ("means", "healthy", "change")}
    assert FIELDS | chinese <= set(entry) <= FIELDS | chinese | {"verl", "formula_zh"}
    assert all(entry[name] for name in FIELDS | chinese)
    assert all(re.search(r"[\u4e00-\u9fff]", entry[f"{name}_zh"]) for name in ("means", "change"))


def test_every_text_has_both_languages_with_the_same_fields():
    for name, texts in compat.toml(report.TEXTS).items():
        fields = [sorted(part[1] for part in string.Formatter().parse(texts[key]) if part[1]) for key in ("en", "zh")]
        assert set(texts) == {"en", "zh"} and fields[0] == fields[1], name


@pytest.mark.parametrize("asked, metric", [
    ("truncated responses", "response_length/clip_ratio"), ("response too long", "response_length/clip_ratio"),
    ("why does the trainer wait", "fully_async/trainer/idle_ratio"), ("how fast", "perf/throughput"),
    ("learning rate", "actor/lr"), ("long tail", "esgrpo/tail_ratio"), ("gpu memory", "perf/max_memory_allocated_gb"),
    ("old samples", "count/dropped_stale_samples"), ("奖励一直为 0", "critic/score/mean"),
    ("回复被截断", "response_length/clip_ratio"), ("显存", "perf/max_memory_allocated_gb"),
    ("actor/entropyy", "actor/entropy"), ("mq_quue_size", "monitor/queue/mq_queue_size")])
def test_an_unknown_name_suggests_by_meaning(asked, metric):
    pattern = report.find(metric)
    assert pattern in [found for _, found in report.similar(asked)], report.similar(asked)
    with pytest.raises(report.EsgrpoError) as caught:
        report.chosen(asked)
    assert report.load()[pattern]["means"] in caught.value.args[4]


@pytest.mark.parametrize("name", ["actor/entropy", "critic/score/mean", "response_length/clip_ratio", "timing_s/gen",
                                  "val-core/openai/gsm8k/reward/mean@1", "perf/throughput", "rollout_corr/kl"])
def test_verls_own_step_metrics(name, capsys):
    assert cli.main(["explain", name]) == 0
    assert "healthy:" in capsys.readouterr().out
    assert report.find(f"{name}/made/up") is None or "val-" in name or "timing" in name


def test_the_answers_in_chinese(capsys, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(NOTES.replace("max_queue_size': 307", "max_queue_size': 192"))
    assert cli.main(["explain", "--lang", "zh", "--log", str(log)]) == 1
    out = capsys.readouterr().out
    assert "结论：瓶颈在 rollout" in out and "不符：" in out or "不符: " in out
    assert cli.main(["explain", "--lang", "zh", "actor/entropy"]) == 0
    assert "正常：" in capsys.readouterr().out
    assert cli.main(["explain", "--lang", "zh", "mq_quue_size"]) == 2
    assert "是不是想问" in capsys.readouterr().err


def test_nothing_is_explained_that_the_overlay_does_not_emit():
    shapes = [re.escape(name).replace(r"\{\}", ".+") for name in emitted()] + [
        r"esgrpo/(bubble_rate|prune/\w+|waste/\w+|length_bias/.*)"]  # these are put together from a prefix
    for pattern in report.load():
        for name in report.expand(pattern):
            if name.startswith("esgrpo/"):
                assert any(re.fullmatch(shape, name) for shape in shapes), name


def test_the_log_of_the_issue():
    lines, holds = report.of_log(NOTES)
    assert holds
    assert any("307 = int(64 x 1.2 x 4)" in line for line in lines)
    assert "ok: max_concurrent_samples: 32 = 16 a replica x 2" in lines
    assert any("99 = 66 generated + 0 dropped + 32 running + 1 that waits for a slot" in line for line in lines)
    assert lines[-1] == ("verdict: rollout is the bottleneck: all 32 slots are busy and only 2 of 64 prompts for the "
                         "next step are finished")
    assert not [line for line in lines if line.startswith("WRONG")]


@pytest.mark.parametrize("printed, said", [
    ("  'async_training': {'concurrent_samples_per_replica': 32,", "= 32 a replica x 1"),
    ("++async_training.concurrent_samples_per_replica=32", "= 32 a replica x 1"),
    ("'concurrent_samples_per_replica': 12,", "is a concurrency of its own"),
    ("'concurrent_samples_per_replica': 0,", "= 16 a replica x 2"),
    ("'concurrent_samples_per_replica': None,", "= 16 a replica x 2")])
def test_slots_of_a_replica_are_those_that_the_log_says(printed, said):
    lines, _ = report.of_log(f"{printed}\n{NOTES}")
    assert f"ok: max_concurrent_samples: 32 {said}" in lines


def test_what_is_no_number_is_no_value():
    """Versions and addresses stand in every log; a JSONL row may hold a text."""
    log = ("pulling image vllm/vllm-openai:0.11.0 from tcp/host:10.0.0.1\n"
           "step:3 - actor/entropy:0.5 - actor/grad_norm:1e-3 - perf/time:np.float64(2.5)\n"
           '{"step": 3, "data": {"critic/score/mean": "tensor(0.5)", "actor/lr": 1e-6}}')
    assert report.read(log) == {"actor/entropy": [0.5], "actor/grad_norm": [0.001], "perf/time": [2.5],
                                "actor/lr": [1e-6]}


@pytest.mark.parametrize("old, new", [
    ("max_required_samples': 307", "max_required_samples': 306"), ("max_queue_size': 307", "max_queue_size': 192"),
    ("staleness_samples': 99", "staleness_samples': 300"), ("active_tasks_size': 32", "active_tasks_size': 33")])
def test_values_that_contradict_each_other_are_told(old, new, tmp_path, capsys):
    assert old in NOTES
    log = tmp_path / "run.log"
    log.write_text(NOTES.replace(old, new))
    assert cli.main(["explain", "--log", str(log)]) == 1
    assert "WRONG: " in capsys.readouterr().out


@pytest.mark.parametrize("required, staleness", [
    ("NaN", 0.2), (64, "Infinity"), (64, -1), (0, 0.2), (1e-320, 0.2), (1e308, 9.0)])
def test_values_that_no_arithmetic_can_be_done_with(required, staleness, tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    log.write_text(f'{{"step": 1, "data": {{"static/required_samples": {required}, "static/staleness_threshold": '
                   f'{staleness}, "static/max_required_samples": 307, "fully_async/trainer/idle_ratio": NaN}}}}\n')
    assert cli.main(["explain", "--log", str(log)]) in (0, 1)
    out, errors = capsys.readouterr()
    assert "static/max_required_samples" in out and "verdict: cannot be told" in out and errors == ""


@pytest.mark.parametrize("name, code, said", [
    ("nosuch", 2, "explain: no metric nosuch |"), ("esgrpo/bubble_rate", 2, "esgrpo/bubble_rate has no value in it |"),
    ("active_tasks", 0, ""), ("fully_async/static/max_queue_size", 0, "")])
def test_a_name_that_a_log_has_not_is_told(name, code, said, tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(NOTES)
    assert cli.main(["explain", name, "--log", str(log)]) == code
    assert said in capsys.readouterr().err


def statistics(**changed) -> str:
    values = {"mq_queue_size': 2": f"mq_queue_size': {changed.get('queued', 2)}",
              "active_tasks_size': 32": f"active_tasks_size': {changed.get('active', 32)}",
              "staleness_samples': 99": f"staleness_samples': {changed.get('stale', 99)}"}
    text = NOTES
    for old, new in values.items():
        text = text.replace(old, new)
    return text


def v1_steps(waits, starved=None) -> str:
    """The log of a v1 trainer whose steps last 10 s."""
    told = "" if starved is None else f" - esgrpo/bubble/paused:0.0 - esgrpo/bubble/starved:{starved}"
    return "\n".join(f"step:{number} - timing_s/gen:{wait} - timing_s/step:10.0 - "
                     f"training/off_policy/trajectory_staleness/mean:1.0{told}" for number, wait in enumerate(waits))


@pytest.mark.parametrize("text, verdict", [
    (statistics(queued=64), "the trainer is the bottleneck: 64 finished prompts wait"),
    (statistics(stale=307), "the trainer is the bottleneck: 2 finished prompts wait, one step takes 64, and rollout is "
                            "paused by the staleness limit"),
    (statistics(active=5), "rollout is the bottleneck, and not for want of slots: 5 of 32"),
    ("step:3 - fully_async/trainer/idle_ratio:0.6 - fully_async/rollouter/idle_ratio:np.float64(0.05)",
     "rollout is the bottleneck: the trainer waits 60%"),
    ("step:3 - fully_async/trainer/idle_ratio:0.02 - fully_async/rollouter/idle_ratio:0.5",
     "the trainer is the bottleneck"),
    ('{"step": 1, "data": {"fully_async/trainer/idle_ratio": 0.1, "fully_async/rollouter/idle_ratio": 0.15}}',
     "neither side is the bottleneck"),
    # everything on, on an H200: rollout goes on and its groups are left out
    (statistics(queued=64) + "\nstep:3 - fully_async/trainer/idle_ratio:0.04 - fully_async/rollouter/idle_ratio:0.1",
     "the trainer is the bottleneck: the trainer waits 4% of its time, rollout is paused 10%; 64 finished"),
    (statistics(queued=2) + "\nstep:3 - fully_async/trainer/idle_ratio:0.04 - fully_async/rollouter/idle_ratio:0.1",
     "neither side is the bottleneck: the trainer waits 4%"),
    (statistics(queued=64) + "\nstep:3 - fully_async/trainer/idle_ratio:0.6 - fully_async/rollouter/idle_ratio:0.05",
     "rollout is the bottleneck: the trainer waits 60%"),  # the queue was full at that moment only
    ("step:3 - esgrpo/tail_ratio:2.5", "cannot be told"),
    (v1_steps(waits=(0.0, 9.0, 0.0)), "rollout is the bottleneck: the trainer waits 30% of its steps for samples (how"),
    (v1_steps(waits=(0.0, 0.6, 0.0)), "the trainer is the bottleneck: the trainer waits 2% of its steps for samples"),
    (v1_steps(waits=(0.0, 0.6, 0.0), starved=0.4),
     "the trainer is the bottleneck: the trainer waits 2% of its steps for samples, replicas have nothing to run 40%"),
    (v1_steps(waits=(0.0, 4.5, 0.0), starved=0.1), "neither side is the bottleneck: the trainer waits 15%"),
    # of a v1 run with verl's group filter on an H200: plain verl, and with the overlay
    (v1_steps(waits=(5.4,), starved=0.46),
     "neither side is the bottleneck, each waits for the other: the trainer waits 54% of its steps for samples, "
     "replicas have nothing to run 46% of their time; more prompts in process would fill both: under separate_async a "
     "larger trainer.v1.separate_async.num_warmup_batches"),
    (v1_steps(waits=(3.9,), starved=0.6), "neither side is the bottleneck, each waits for the other"),
    ("step:3 - fully_async/trainer/idle_ratio:0.5 - fully_async/rollouter/idle_ratio:0.3",
     "neither side is the bottleneck, each waits for the other: the trainer waits 50% of its time, rollout is paused "
     "30%; more prompts in process would fill both: a larger async_training.staleness_threshold, or "),
    (v1_steps(waits=(0.0, "nan", 9.0, 0.0)), "rollout is the bottleneck: the trainer waits 22%"),
    (v1_steps(waits=(0.0, 9.0, 9.0), starved=0.1), "rollout is the bottleneck: the trainer waits 60%"),
])
def test_verdicts(text, verdict):
    assert report.of_log(text)[0][-1].startswith(f"verdict: {verdict}")


IDLE_ROLLOUT = "step:3 - fully_async/trainer/idle_ratio:0.02 - fully_async/rollouter/idle_ratio:0.5"
TAUGHT = (" - perf/total_num_tokens:35000 - response_length/mean:70 - prompt_length/mean:70"
          " - esgrpo/waste/zero_variance:")


@pytest.mark.parametrize("text, cure", [
    (f"{IDLE_ROLLOUT}{TAUGHT}7700", "; 44% of the response tokens that it trains are of groups without a gradient: "
     "actor_rollout_ref.rollout.segment.null_groups=spare (measured with async_training.staleness_threshold=2) leaves"),
    (f"{v1_steps(waits=(0.0, 0.6))}{TAUGHT}3500", "; 20% of the response tokens that it trains are of groups without a "
     "gradient: algorithm.filter_groups.enable=True leaves"),
    (f"{IDLE_ROLLOUT}{TAUGHT}3400", ""),
    (f"{IDLE_ROLLOUT}{TAUGHT}nan", ""),
    (f"{IDLE_ROLLOUT} - esgrpo/waste/zero_variance:7700", ""),
    (f"{IDLE_ROLLOUT}{TAUGHT}7700".replace("mean:70", "mean:0"), ""),
    (f"{IDLE_ROLLOUT}{TAUGHT}7700".replace("trainer/idle_ratio:0.02", "trainer/idle_ratio:0.9"), "")])
def test_a_trainer_that_trains_groups_without_a_gradient_is_told_the_filter(text, cure):
    said, line = "groups without a gradient", report.of_log(text)[0][-1]
    assert cure in line and (said in line) is bool(cure)


def test_the_command_line(capsys, tmp_path):
    assert cli.main(["explain", "static/max_queue_size"]) == 0
    out = capsys.readouterr().out
    assert "formula: max_required_samples" in out and "FullyAsyncRollouter" in out
    assert cli.main(["explain", "fully_async/count/staleness_samples"]) == 0  # with the trainer's prefix
    assert cli.main(["explain"]) == 0 and "esgrpo/tail_ratio" in capsys.readouterr().out
    assert cli.main(["explain", "mq_quue_size"]) == 2 and "did you mean" in capsys.readouterr().err
    assert cli.main(["explain", "--log", str(tmp_path / "none")]) == 2
    (tmp_path / "run.log.gz").write_bytes(gzip.compress(NOTES.encode()))
    assert cli.main(["explain", "--log", str(tmp_path / "run.log.gz")]) == 0
    assert "verdict: rollout is the bottleneck" in capsys.readouterr().out
    (tmp_path / "run.zip").write_bytes(b"PK\x03\x04" + bytes(99))
    assert cli.main(["explain", "--log", str(tmp_path / "run.zip")]) == 2
    assert "run.zip: zip | " in capsys.readouterr().err
    (tmp_path / "other.log").write_text("hello\n")
    assert cli.main(["explain", "--log", str(tmp_path / "other.log")]) == 2
