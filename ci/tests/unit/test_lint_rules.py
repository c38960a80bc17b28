"""Rules of esgrpo lint on bare configurations, how it chooses a release, and what it says when it cannot check."""

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest

from esgrpo import cli, compat
from esgrpo.errors import EsgrpoError
from esgrpo.tools import language, upstreams
from esgrpo.tools.lint import check, compose, release, rules
from esgrpo.tools.lint.script import Argument, Script

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MAIN = "verl.trainer.main_ppo"


def config(values: dict, module: str = MAIN, version: str = "0.9.1", **more) -> rules.Config:
    """`values` by dotted key; all of them count as given."""
    tree: dict = {}
    for key, value in values.items():
        node = tree
        *path, name = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return rules.Config(tree, frozenset(values), module, version, more.pop("device", "cuda"), False, **more)


def found(rule, values: dict, **more) -> list[tuple[str, str]]:
    return [(severity, key) for severity, key, *_ in rule(config(values, **more))]


LOW, HIGH = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"


@pytest.mark.parametrize("low, high, mode, keys", [
    (0.8, 1.2, "vanilla", [LOW]), (0.2, 1.28, "vanilla", [HIGH]), (0.8, 0.28, "gspo", [LOW]),
    (0.2, 0.28, "vanilla", []), (0.0003, 0.0004, "gspo", []), (0.2, 10.0, "vanilla", []),
    (10, 0.2, "cispo", []), (0.8, 1.2, "cispo", []),
    (1, 1, "clip_cov", []), (1, 0.28, "vanilla", [])])
def test_clip_ratios_written_as_factors(low, high, mode, keys):
    values = {LOW: low, HIGH: high, f"{ACTOR}.policy_loss.loss_mode": mode}
    assert found(rules.clipping, values) == [("warning", key) for key in keys]


def test_the_clip_ratios_that_were_meant_are_named():
    ((*_, problem, todo),) = rules.clipping(config({LOW: 0.8, HIGH: 1.2, f"{ACTOR}.policy_loss.loss_mode": "vanilla"}))
    assert "[0.2, 2.2]" in problem and "clip_ratio_low=0.2, clip_ratio_high=0.2" in todo


def sizes(tensor: int, nodes: int = 1, devices: int = 8, place: str = "trainer", **more) -> dict:
    return {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": tensor, f"{place}.nnodes": nodes,
            f"{place}.n_gpus_per_node": devices, **more}


FULLY_ASYNC = {"async_training.staleness_threshold": 0.5}
SEPARATE = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "separate_async"}


@pytest.mark.parametrize("values, severity", [
    (sizes(16), "error"), (sizes(16, 2), None), (sizes(3), "warning"), (sizes(8), None),
    (sizes(8, 1, 4, "rollout", **FULLY_ASYNC), "error"), (sizes(4, 1, 4, "rollout", **FULLY_ASYNC), None),
    (sizes(8, 1, 4, ROLLOUT, **SEPARATE), "error"), (sizes(4, 1, 4, ROLLOUT, **SEPARATE), None),
    (sizes(4, 1, 8) | {f"{ROLLOUT}.pipeline_model_parallel_size": 4}, "error"),
    (sizes("esgrpo_unknown"), None), (sizes(16, 1, "esgrpo_unknown"), None),
    (sizes(16) | {f"{ROLLOUT}.name": "hf"}, None)])
def test_a_replica_needs_accelerators(values, severity):
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    assert found(rules.replicas, values) == ([(severity, key)] if severity else [])


@pytest.mark.parametrize("share, wrong", [(1.5, True), (0, True), (90, True), (1, False), (0.9, False)])
def test_the_share_of_memory(share, wrong):
    key = f"{ROLLOUT}.gpu_memory_utilization"
    assert found(rules.lengths, {f"{ROLLOUT}.name": "vllm", key: share}) == ([("error", key)] if wrong else [])


@pytest.mark.parametrize("temperature, n, wrong", [(0, 8, True), (0.0, 2, True), (0, 1, False), (1.0, 8, False)])
def test_greedy_groups(temperature, n, wrong):
    key = f"{ROLLOUT}.temperature"
    assert found(rules.losses, {key: temperature, f"{ROLLOUT}.n": n}) == ([("warning", key)] if wrong else [])


MODE, PATH = "trainer.resume_mode", "trainer.resume_from_path"


@pytest.mark.parametrize("mode, path, finding", [
    ("resume_path", None, ("error", MODE)), ("resume_path", "/run/last", ("error", PATH)),
    ("resume_path", "/run/global_step_100", None), ("auto", "/run/global_step_100", ("warning", PATH)),
    ("auto", None, None), ("resume_path", "esgrpo_unknown", None)])
def test_resuming(mode, path, finding):
    assert found(rules.resuming, {MODE: mode, PATH: path}) == ([finding] if finding else [])


def test_one_key_in_async_training_is_no_fully_async_run():
    """recipe/partial_rollout adds async_training.partial_rollout to the synchronous trainer."""
    partial = {"async_training.partial_rollout": True, "data.train_batch_size": 128}
    assert found(rules.fully_async_contract, partial, module="recipe.partial_rollout.main_ppo") == []
    assert found(rules.fully_async_contract, partial | FULLY_ASYNC) == [("error", "data.train_batch_size")]


@pytest.mark.parametrize("values, module, patches, said", [
    (FULLY_ASYNC, "recipe.fully_async_policy.fully_async_main", (), True),
    (FULLY_ASYNC, "recipe.fully_async_policy.fully_async_main", (rules.HCCL_PATCH,), False),
    ({}, "recipe.one_step_off_policy.main_ppo", (), False)])
def test_weight_groups_on_npu(values, module, patches, said):
    """one_step_off_policy of 0.7.0 makes its group with pyhccl; after ./apply.sh fully_async_policy needs no Ray."""
    notes = found(rules.npu, values, module=module, version="0.7.0", device="npu", patches=frozenset(patches))
    assert notes == ([("note", "trainer.device")] if said else [])


def test_slots_of_a_server_that_the_overlay_gives_no_room():
    values = FULLY_ASYNC | {f"{ROLLOUT}.n": 8, "async_training.concurrent_samples_per_replica": 256,
                            f"{ROLLOUT}.segment": {"enable": True}}
    assert found(rules.server_slots, values) == []
    assert [severity for severity, _ in found(rules.server_slots, values, version="0.7.0")] == ["warning"]


@pytest.mark.parametrize("correction, severity", [
    ({"rollout_is": "token"}, "warning"), ({"bypass_mode": True}, "error"), ({"rollout_is": None}, None)])
def test_corrections_without_log_probs(correction, severity):
    """verl leaves out importance sampling without a word; bypass_mode raises."""
    key = f"{ROLLOUT}.calculate_log_probs"
    values = {"algorithm.rollout_correction": correction, key: False}
    assert found(rules.losses, values) == ([(severity, key)] if severity else [])


@pytest.mark.parametrize("validates, dynamic, severity", [
    (True, False, "error"), (False, False, "warning"), (True, True, "warning")])
def test_a_mini_batch_above_the_batch_stops_mains_that_validate(validates, dynamic, severity):
    """verl/experimental/vla has mains of its own, which never call validate_config."""
    key = f"{ACTOR}.ppo_mini_batch_size"
    values = {"data.train_batch_size": 8, key: 128, f"{ACTOR}.use_dynamic_bsz": dynamic}
    assert found(rules.batches, values, validates=validates) == [(severity, key)]


@pytest.mark.parametrize("legacy, severities", [(True, []), (False, ["error"])])
def test_the_reference_section_of_legacy_workers_is_no_dataclass(tmp_path, legacy, severities):
    """verl 0.7's FSDP workers read actor_rollout_ref.ref.model, which FSDPActorConfig has no field for."""
    workers = tmp_path / "verl" / "workers"
    (workers / "config").mkdir(parents=True)
    (workers / "config" / "actor.py").write_text("class FSDPActorConfig:\n    strategy: str = 'fsdp'\n")
    (workers / "engine_workers.py").write_text("model = 1\n")
    if legacy:
        (workers / "fsdp_workers.py").write_text("")
    key = "actor_rollout_ref.ref.model.override_config.attn_implementation"
    result = {"key": key, "at": "actor_rollout_ref.ref", "missing": "model", "beside": ["strategy"],
              "target": "verl.workers.config.FSDPActorConfig"}
    findings = check._key(Argument(f"+{key}=eager", 1), result, [], release.Release("0.7.1", tmp_path), MAIN)
    assert [finding.severity for finding in findings] == severities


def test_a_section_of_another_engine_names_the_engine(tmp_path):
    key = "actor_rollout_ref.actor.megatron.param_offload"
    result = {"key": key, "at": "actor_rollout_ref.actor", "missing": "megatron", "beside": ["fsdp_config"],
              "target": "", "kind": "key", "error": "not in struct"}
    (finding,) = check._key(Argument(f"{key}=True", 1), result, [], release.Release("0.9.1", tmp_path), MAIN)
    assert "model_engine=megatron" in finding.todo


# ---- which release

def test_the_release_that_a_recipe_asks_for(tmp_path):
    wanted = tmp_path / release.REQUIRED
    for text, version in {"# x\nMODE=pinned_tag\nTAG=v0.6.1\nCOMMIT=" + "a" * 40: "0.6.1",
                          "COMMIT=" + "b" * 40: "b" * 40, "BRANCH=main\nVERL_COMMIT=" + "c" * 40: "c" * 40,
                          "OPTION_A_TAG=v0.4.0": "0.4.0",
                          "OPTION_A_TAG=v0.4.0\nOPTION_B_VERL_COMMIT=" + "d" * 40: "d" * 40,
                          "MODE=rolling\nBRANCH=main": ""}.items():
        wanted.write_text(text)
        assert release.required_by(wanted) == version


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Sources of any release of verl: a main, and the names of the releases that were asked for."""
    asked = []

    def sources(name, version, say=print):
        asked.append(version)
        root = tmp_path / f"verl-{version}"
        (root / "verl" / "trainer").mkdir(parents=True, exist_ok=True)
        (root / "verl" / "trainer" / "main_ppo.py").write_text("")
        return root

    monkeypatch.setattr(upstreams, "sources", sources)
    monkeypatch.setattr(release, "installed", lambda: None)
    return asked


def script_in(folder: Path, text: str = f"python3 -m {MAIN} a.b=1\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.sh").write_text(text)
    return folder / "run.sh"


def test_the_release_is_chosen_by_evidence(upstream, tmp_path, monkeypatch):
    recipe = script_in(tmp_path / "recipes" / "dapo")
    (tmp_path / "recipes" / "dapo" / release.REQUIRED).write_text("TAG=v0.6.1\n")
    got = release.find(None, MAIN, recipe)
    assert (got.version, got.why, got.asked_in) == ("0.6.1", "judged_required", release.REQUIRED)
    inside = script_in(tmp_path / "checkout" / "examples")
    (tmp_path / "checkout" / "verl" / "version").mkdir(parents=True)
    (tmp_path / "checkout" / "verl" / "version" / "version").write_text("0.8.0.dev")
    got = release.find(None, MAIN, inside)
    assert (got.version, got.why) == ("0.8.0", "judged_checkout")
    assert release.find("0.7.1", MAIN, recipe).why == "judged_given"
    lonely = script_in(tmp_path / "alone")
    assert release.find(None, MAIN, lonely).why == "judged_newest"
    old = release.find(None, "recipe.fully_async_policy.fully_async_main", lonely)
    assert (old.version, old.why) == ("0.7.0", "judged_legacy")
    assert release.find(None, "recipe.dapo.main_dapo", lonely).version != "0.7.0"  # a recipe of today
    monkeypatch.setattr(release, "installed", lambda: release.Release("0.9.0", tmp_path, "judged_installed"))
    assert release.find(None, MAIN, lonely).why == "judged_installed"


def test_a_recipes_main_is_found_beside_the_script(tmp_path):
    script = script_in(tmp_path / "recipes" / "dapo")
    main = tmp_path / "recipes" / "dapo" / "main_dapo.py"
    main.write_text('@hydra.main(config_path="config", config_name="x")\n')
    beside = tuple(script.parents)[:3]
    root = tmp_path / "verl"
    assert release.Release("0.9.1", root, beside=beside).main("recipe.dapo.main_dapo") == (
        script.parent / "config", "x")
    assert release.Release("0.9.1", root, beside=beside).main("main_dapo") == (script.parent / "config", "x")
    assert release.Release("0.9.1", root).main("recipe.dapo.main_dapo") is None
    assert release.Release("0.9.1", root, beside=beside).main("verl.dapo.main_dapo") is None
    (root / "verl" / "trainer" / "config").mkdir(parents=True)  # named as if the recipe lay in verl's recipe/
    main.write_text('@hydra.main(config_path="../../verl/trainer/config", config_name="x")\nread_here = 1\n')
    found = release.Release("0.9.1", root, beside=beside)
    assert found.main("recipe.dapo.main_dapo") == (root / "verl" / "trainer" / "config", "x")
    assert "read_here" in found.names("recipe.dapo.main_dapo") and "read_here" not in found.names(MAIN)


@pytest.mark.parametrize("written, found", [
    ("$(pwd)", True), ("$PWD", True), ("`pwd`", True), ("$(somewhere)", False), ("$HERE", False)])
def test_a_config_path_from_where_the_script_starts(tmp_path, written, found):
    (tmp_path / "examples" / "config").mkdir(parents=True)
    script = script_in(tmp_path, f'HERE2={written}\npython3 -m {MAIN} --config-path="$HERE2/examples/config" a.b=1\n')
    (launch,) = Script(script).launches
    path = launch.arguments[0].text.partition("=")[2]
    got = check._from_where_it_starts(path, release.Release("0.9.1", tmp_path))
    assert got == (str(tmp_path / "examples" / "config") if found else path)
    assert check._from_where_it_starts(f"{path}/none", release.Release("0.9.1", tmp_path)) == f"{path}/none"


@pytest.mark.parametrize("rollout, refused, unchecked", [
    ({"segment": {"profile": rules.PLACEHOLDER, "kv_headroom": rules.PLACEHOLDER, "seed": -1}}, ["segment.seed"],
     ["segment.profile", "segment.kv_headroom"]),
    ({"segment": {"prune": rules.PLACEHOLDER}}, [], ["segment.prune"]),
    ({"segment": rules.PLACEHOLDER}, [], ["segment"]),
    ({"segment": {"profil": rules.PLACEHOLDER}}, ["segment.profil"], [])])  # no value makes such a key right
def test_what_the_overlay_would_refuse_of_values_from_the_environment(rollout, refused, unchecked):
    omegaconf = pytest.importorskip("omegaconf")
    said = compose._overlay(omegaconf.OmegaConf.create({
        "actor_rollout_ref": {"rollout": rollout, "actor": {}}, "data": {"max_response_length": 64}}))
    assert [one["refusal"][0] for one in said if "refusal" in one] == [f"{ROLLOUT}.{key}" for key in refused]
    assert [one["unchecked"] for one in said if "unchecked" in one] == [
        ", ".join(f"{ROLLOUT}.{key}" for key in unchecked)] * bool(unchecked)
    assert rules.PLACEHOLDER not in str([one for one in said if "refusal" in one])
    for name, key in ((rules.PLACEHOLDER, "unchecked"), ("sglang", "refusal")):
        assert list(compose._refusal(EsgrpoError(f"{ROLLOUT}.name", repr(name), "vllm", "no start", "set it"))) == [key]


# ---- what cannot be checked is said, and is no clean answer

def test_missing_sources_of_a_recipe_name_the_commands_that_fetch_them(upstream, tmp_path, capsys):
    script = script_in(tmp_path / "alone", "python3 -m recipe.dapo.main_dapo a.b=1\n")
    assert cli.main(["lint", str(script), "--verl", "0.9.1"]) == check.UNUSABLE
    out, errors = capsys.readouterr()
    assert "git clone" in out and "git -C verl checkout v0.9.1" in out and "submodule update" in out
    assert "NOT CHECKED" in errors and "0 errors" in errors


def test_without_verl_the_script_alone_is_checked(tmp_path, monkeypatch, capsys):
    def sources(name, version, say=print):
        raise upstreams.Unavailable(f"{name} {version}", "no network", "a wheel", "nothing", "connect")

    monkeypatch.setattr(upstreams, "sources", sources)
    monkeypatch.setattr(release, "installed", lambda: None)
    cut = script_in(tmp_path, f"python3 -m {MAIN} a.b=1 \\\n\n  c.d=2\n")
    assert cli.main(["lint", str(cut), "--verl", "0.9.1"]) == 1
    out = capsys.readouterr().out
    assert "never reach it" in out and "Not checked: keys" in out and "no network" in out
    whole = script_in(tmp_path, f"python3 -m {MAIN} a.b=1\n")
    assert cli.main(["lint", str(whole), "--verl", "0.9.1"]) == check.UNUSABLE
    out, errors = capsys.readouterr()
    assert "git -C verl checkout v0.9.1" in out and "0 errors, 0 warnings, 1 note" in errors.splitlines()[-1]
    assert cli.main(["lint", str(whole), "--verl", "0.7.9"]) == check.UNUSABLE  # no such release
    out = capsys.readouterr().out
    assert "git clone" not in out and f"give one of {', '.join(release.releases())} with --verl" in out
    assert release.releases()[-1] == "0.9.1"


def test_without_hydra_the_answer_says_what_was_not_checked(upstream, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(release.Release, "compose", lambda *_: None)
    monkeypatch.setattr(release.Release, "main", lambda self, module: (tmp_path, "ppo_trainer"))
    script = script_in(tmp_path, f"python3 -m {MAIN} \n")
    assert cli.main(["lint", str(script), "--verl", "0.9.1"]) == check.UNUSABLE
    out, errors = capsys.readouterr()
    assert "Not checked: values" in out and "NOT CHECKED" in errors


# ---- scripts

def test_crlf_is_one_error_and_the_rest_is_read(tmp_path):
    script = tmp_path / "run.sh"
    script.write_bytes(f"python3 -m {MAIN} \\\r\n  a.b=1 \\\r\n  c.d=2\r\n".encode())
    read = Script(script)
    (launch,) = read.launches
    assert read.crlf == 3 and [a.text for a in launch.arguments] == ["a.b=1", "c.d=2"] and not launch.dropped
    bash = shutil.which("bash") or pytest.skip("no bash")
    done = subprocess.run([bash, str(script)], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.stderr.count("\n") >= 3  # three commands that are not found, where one was meant
    script.write_bytes(script.read_bytes().replace(b"\r", b""))
    assert Script(script).crlf == 0


@pytest.mark.parametrize("command, told", [
    ("esgrpo run -- python3 -m", False), ("python3 -m esgrpo run -- python3 -m", False),
    ("ESGRPO_ENABLE=1 python3 -m", False), ("python3 -m", True)])
def test_start_with_esgrpo_run_only_where_the_script_does_not(tmp_path, command, told):
    (launch,) = Script(script_in(tmp_path, f"{command} {MAIN} a.b=1\n")).launches
    findings = check._overlay([{"features": []}], release.Release("0.9.1", tmp_path), {}, launch)
    assert any("esgrpo run" in finding.todo for finding in findings) == told


def test_the_overlay_does_it_only_where_it_changes_something(tmp_path):
    (launch,) = Script(script_in(tmp_path)).launches
    lines = ["actor_rollout_ref.rollout.free_cache_engine: True -> False, because requests stay",
             "actor.loss_agg_mode: token-mean divides by what pruning leaves, so the gradient is biased"]
    answers = [{"line": line} for line in lines]
    changes, says = check._overlay(answers, release.Release("0.9.1", tmp_path), {}, launch)[1:]
    assert changes.todo == "nothing: the overlay does it" and "changes nothing" in says.todo


# ---- texts

TABLES = compat.toml(rules.FILE)


@pytest.mark.parametrize("name", TABLES)
def test_every_finding_has_both_languages_with_the_same_fields(name):
    table = TABLES[name]
    assert set(table) == {"problem", "problem_zh", "todo", "todo_zh"}
    fields = {key: {part[1] for part in string.Formatter().parse(text)} - {None} for key, text in table.items()}
    assert fields["problem"] == fields["problem_zh"] and fields["todo"] == fields["todo_zh"]
    assert all(bool(table[key]) == bool(table[f"{key}_zh"]) for key in ("problem", "todo"))


def test_the_source_names_every_finding_and_no_other():
    source = "\n".join(file.read_text() for file in Path(check.__file__).parent.glob("*.py"))
    assert [name for name in TABLES if f'"{name}"' not in source] == []
    used = re.findall(r'(?:said|phrase)\("(\w+)"', source) + re.findall(
        r'(?:found|_finding)\([^"]*?(?:"[^"]*"[^"]*?)?"(\w+)", ?\w+=', source)
    assert used and set(used) <= set(TABLES)


def test_the_answer_in_chinese():
    with language.speaking("zh"):
        ((severity, _, problem, todo),) = rules.losses(config({f"{ROLLOUT}.temperature": 0, f"{ROLLOUT}.n": 8}))
    assert severity == "warning" and "贪心解码" in problem and "8 个回复" in problem and "设为 1.0" in todo
