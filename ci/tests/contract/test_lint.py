"""esgrpo lint against the real config trees of verl's releases: the issue's script, the recipes, verl's own scripts."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import train
from ci.tests.contract.patched import patch_file, pristine, touched, tree
from esgrpo import cli
from esgrpo.tools import upstreams
from esgrpo.tools.lint import check, release, rules
from esgrpo.tools.lint.script import Script

pytest.importorskip("hydra")
ROOT = Path(__file__).resolve().parents[3]
CUT = ROOT / "ci" / "tests" / "unit" / "scripts" / "megatron_cut.sh"
RECIPES = ROOT / "bench" / "recipes"
VERSIONS = ("0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
NEWEST = "0.9.1"
HOME = {"HOME": "/home/user"}


def found(result, severity=None) -> dict[str, check.Finding]:
    return {f.key: f for f in result.findings if severity in (None, f.severity)}


@pytest.fixture(scope="module")
def newest() -> str:
    return str(pristine("verl", f"v{NEWEST}"))


# ---- the script of the issue


def test_the_cut_script_of_the_issue():
    pristine("verl", "v0.7.0")
    result = check.lint(CUT, "0.7.0")
    errors, notes = found(result, "error"), found(result, "note")
    assert set(errors) == {"line continuation",
                           "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn",
                           "actor_rollout_ref.ref.megatron.override_transformer_config.use_flash_attn"}
    cut = errors["line continuation"]
    lines = CUT.read_text().splitlines()
    assert lines[cut.line - 1].endswith("persist_layer_norm=True \\") and not lines[cut.line].strip()
    assert "59 arguments" in cut.problem and "actor_rollout_ref.actor.entropy_coeff" in cut.problem
    assert "separate commands" in cut.problem
    (typo,) = [f for key, f in notes.items() if key.startswith("acto_rollout_ref")]
    assert "in a comment" in typo.problem and "did you mean actor_rollout_ref.actor.megatron" in typo.todo
    assert not found(result, "warning")


def test_the_repaired_script_is_clean(tmp_path):
    pristine("verl", "v0.7.0")
    lines = CUT.read_text().splitlines()
    attention = "    +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True \\"
    start = next(i for i, line in enumerate(lines) if line.endswith("persist_layer_norm=True \\"))
    rest = next(i for i, line in enumerate(lines) if line.strip().startswith("actor_rollout_ref.actor.entropy_coeff"))
    script = tmp_path / "run.sh"
    script.write_text("\n".join([*lines[:start + 1], attention, *lines[rest:]]))
    assert {f.severity for f in check.lint(script, "0.7.0").findings} <= {"note"}


def test_the_same_script_on_a_newer_release(newest, tmp_path):
    old = found(check.lint(CUT, newest), "error")
    assert "verl.experimental.fully_async_policy.fully_async_main" in old["recipe.fully_async_policy."
                                                                           "fully_async_main"].todo
    script = tmp_path / "run.sh"
    script.write_text(CUT.read_text().replace("recipe.fully", "verl.experimental.fully"))
    errors = found(check.lint(script, newest), "error")
    assert "did you mean trainer.test_freq?" in errors["rollout.test_freq"].todo
    assert "line continuation" in errors


# ---- recipes

SEGMENT = "actor_rollout_ref.rollout.segment"


def recipe_cases():
    return [(version, recipe, backend, device) for version in VERSIONS for recipe in ("fully_async", "one_step_off")
            for backend in ("fsdp2", "megatron") for device in ("gpu", "npu")]


@pytest.mark.slow
@pytest.mark.parametrize("version, recipe, backend, device", recipe_cases())
def test_recipes_pass_on_their_release(version, recipe, backend, device):
    pristine("verl", f"v{version}")
    script = RECIPES / f"{recipe}.sh"
    variables = {"VERL": version, "BACKEND": backend, "DEVICE": device, **HOME}
    result = check.lint(script, version, variables)
    assert [str(f) for f in result.findings if f.severity != "note"] == []
    (launch,) = Script(script, variables).launches
    texts = [a.text for a in launch.arguments]
    switch = "enable=True" if version == "0.7.0" else "profile=elastic"  # 0.7.0 has no place for the rest of it
    segment = f"+actor_rollout_ref.rollout.segment.{switch}" in texts
    assert segment == (version.startswith("0.9") or (version == "0.7.0" and recipe == "fully_async"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("version, recipe, backend, device", recipe_cases()[::3])
def test_recipes_say_the_same_to_bash_and_to_the_linter(version, recipe, backend, device, tmp_path):
    for name in ("python3", "esgrpo"):  # esgrpo run -- CMD ...: print CMD's arguments
        (tmp_path / name).write_text('#!/bin/bash\n[ "$1" = run ] && shift 3\nprintf "%s\\0" "$@"\n')
        (tmp_path / name).chmod(0o755)
    variables = {"VERL": version, "BACKEND": backend, "DEVICE": device, **HOME}
    script = RECIPES / f"{recipe}.sh"
    done = subprocess.run(["bash", str(script), "trainer.seed=1"], capture_output=True, text=True, timeout=60,
                          env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables})
    assert done.returncode == 0, done.stderr
    (launch,) = Script(script, variables).launches
    assert done.stdout.split("\0")[:-1] == ["-m", launch.module, *(a.text for a in launch.arguments), "trainer.seed=1"]


MAIN = "verl.experimental.fully_async_policy.fully_async_main"


@pytest.mark.parametrize("overrides, error, warning", [
    ((f"+{SEGMENT}.profile=elastic", f"+{SEGMENT}.profile=static"), (5, "added before in line 4"), None),
    ((f"+{SEGMENT}.profile=elastic", f"+{SEGMENT}.profile=elastic"), (5, "added before in line 4"), None),
    ((f"+{SEGMENT}.boundary=yield", f"+{SEGMENT}={{boundary:none}}"), None, None),  # Hydra merges that
    ((f"+{SEGMENT}.profile=elastic", f"{SEGMENT}.profile=static"), None, "set before in line 4"),
    (("+trainer.nnodes=1", "+trainer.nnodes=2"), (5, "exists in verl"), None)])  # negative control: verl's own
def test_what_the_script_has_added_is_not_said_to_be_verls(newest, tmp_path, overrides, error, warning):
    script = tmp_path / "run.sh"
    script.write_text("\n".join(["#!/bin/bash", "esgrpo run -- \\", f"python3 -m {MAIN} \\",
                                 *(f"    {override} \\" for override in overrides), "    data.seed=1\n"]))
    key = overrides[1].lstrip("+").partition("=")[0]
    about = [finding for finding in check.lint(script, newest).findings if finding.key == key and finding.line == 5]
    errors = [(finding.line, finding.problem) for finding in about if finding.severity == "error"]
    assert len(errors) == bool(error) and all(line == error[0] and error[1] in text for line, text in errors)
    warnings = [finding.problem for finding in about if finding.severity == "warning"]
    assert len(warnings) == bool(warning) and all(warning in text for text in warnings)


def test_a_key_of_ours_without_its_plus_is_told_to_add_it(newest, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"esgrpo run -- python3 -m {MAIN} {SEGMENT}.profile=elastic\n")
    finding = found(check.lint(script, newest), "error")[f"{SEGMENT}.profile"]
    assert finding.todo == f"add it: +{SEGMENT}.profile=elastic"


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_front_pages_recipe_is_clean_and_set_as_measured(newest, page):
    """Every setting that decides how much runs at once is that of the training runs whose numbers stand above it."""
    given = re.search(r'(?m)^AS_MEASURED="([^"]+)"$', (ROOT / page).read_text(encoding="utf-8"))[1]
    variables = dict(item.split("=") for item in given.split())
    result = check.lint(RECIPES / "fully_async.sh", newest, {**HOME, **variables})
    assert [str(f) for f in result.findings if f.severity != "note"] == []
    (launch,) = Script(RECIPES / "fully_async.sh", {**HOME, **variables}).launches
    recipe = {a.text.partition("=")[0]: a.text.partition("=")[2] for a in launch.arguments}
    options = train.parse(["--scale", "large"])
    measured = {o.partition("=")[0]: o.partition("=")[2] for o in train.overrides(options, 1, ROOT, ROOT, "overlay")}
    for key in ("async_training.staleness_threshold", "async_training.trigger_parameter_sync_step",
                "async_training.concurrent_samples_per_replica", "async_training.require_batches",
                "async_training.partial_rollout", "actor_rollout_ref.actor.ppo_mini_batch_size",
                "actor_rollout_ref.rollout.n", "data.max_response_length", "trainer.n_gpus_per_node",
                "rollout.n_gpus_per_node", "actor_rollout_ref.model.use_remove_padding",
                "actor_rollout_ref.actor.strategy", "+actor_rollout_ref.model.override_config.attn_implementation",
                f"+{SEGMENT}.profile", f"+{SEGMENT}.segment_length"):
        assert recipe[key] == measured[key], key


# ---- keys and contradictions, each against a recipe that is clean without it

KEYS = {
    "actor_rollout_ref.rollout.tempratur=1": ("error", "did you mean actor_rollout_ref.rollout.temperature?"),
    "reward_manager.name=dapo": ("error", "did you mean"),
    "+acto_rollout_ref.actor.entropy_coeff=0": ("error", "did you mean actor_rollout_ref.actor.entropy_coeff?"),
    "+trainer.nobody_reads_this_name=1": ("warning", ""),
    "+trainer.nnodes=2": ("error", "drop the +"),
    "+actor_rollout_ref.rollout.segmnt.enable=True": ("error", ""),
    "trainer.logger=[console": ("error", "grammar"),
    "model_engine=magatron": ("error", "grammar"),
    "+actor_rollout_ref.rollout.segment.segment_lenght=8": ("error", "segment_length"),
    f"+{SEGMENT}.prune.resolved.enable=True +{SEGMENT}.prune.audit.enable=False": ("error", "audit"),
}
ASYNC = "async_training"
CONTRADICTIONS = {
    "data.train_batch_size=64": ("error", "data.train_batch_size"),
    "actor_rollout_ref.hybrid_engine=True": ("error", "actor_rollout_ref.hybrid_engine"),
    "actor_rollout_ref.rollout.calculate_log_probs=False": ("error", "actor_rollout_ref.rollout.calculate_log_probs"),
    f"{ASYNC}.staleness_threshold=0": ("warning", f"{ASYNC}.partial_rollout"),
    f"{ASYNC}.trigger_parameter_sync_step=0": ("error", f"{ASYNC}.trigger_parameter_sync_step"),
    "rollout.total_rollout_steps=100": ("warning", f"{ASYNC}.trigger_parameter_sync_step"),
    f"{ASYNC}.dynamic_schedule_deactivate_ratio=0.5": ("warning", f"{ASYNC}.dynamic_schedule_deactivate_ratio"),
    "trainer.n_gpus_per_node=7": ("warning", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    "trainer.n_gpus_per_node=1024": ("error", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4": ("error", "trainer.n_gpus_per_node"),
    "actor_rollout_ref.rollout.enable_chunked_prefill=False": None,  # the batch is as long as a row
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024": None,  # chunked prefill is on
    "actor_rollout_ref.rollout.max_model_len=4096": ("warning", "actor_rollout_ref.rollout.max_model_len"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096": (
        "warning", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    "actor_rollout_ref.rollout.n=1": ("warning", "actor_rollout_ref.rollout.n"),
    f"+{SEGMENT}.sync.kv=rebuild +{SEGMENT}.sync.requests=abort": ("error", f"{SEGMENT}.sync.kv"),
    "actor_rollout_ref.actor.policy_loss.loss_mode=pois actor_rollout_ref.actor.ppo_epochs=2": (
        "error", "actor_rollout_ref.actor.ppo_epochs"),
}


@pytest.fixture(scope="module")
def with_overrides(newest, tmp_path_factory):
    """Result for the fully-async recipe with `text` behind its own arguments."""
    source = (RECIPES / "fully_async.sh").read_text().replace('"$@"', "OVERRIDES")
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copy(RECIPES / "common.sh", folder)

    def run(text: str):
        (folder / "run.sh").write_text(source.replace("OVERRIDES", text))
        return check.lint(folder / "run.sh", newest, HOME)

    assert not found(run(""), "error") and not found(run(""), "warning")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("override", KEYS)
def test_keys(with_overrides, override):
    severity, todo = KEYS[override]
    findings = found(with_overrides(override), severity)
    assert len(findings) == 1, findings
    (finding,) = findings.values()
    assert todo in finding.todo + finding.problem


@pytest.mark.slow
@pytest.mark.parametrize("override", CONTRADICTIONS)
def test_contradictions(with_overrides, override):
    result = with_overrides(override)
    worse = [(f.severity, f.key) for f in result.findings if f.severity != "note" and "set before" not in f.problem]
    assert worse == ([] if CONTRADICTIONS[override] is None else [CONTRADICTIONS[override]]), result.findings


@pytest.mark.parametrize("concurrent, batch, segment, named", [
    (256, None, None, f"{ASYNC}.concurrent_samples_per_replica"), (64, None, None, None), (None, None, None, None),
    (256, None, {"enable": True}, None),  # the overlay gives them room
    (None, 256, None, "data.train_batch_size"), (None, 64, None, None)])
def test_calls_of_a_weight_sync_need_a_slot_of_the_server(concurrent, batch, segment, named):
    """8 responses a prompt on one replica whose actor runs 1,024 + 16 calls at once."""
    values = {"actor_rollout_ref": {"rollout": {"n": 8, "max_num_seqs": 1024, "tensor_model_parallel_size": 2,
                                                "segment": segment}},
              "trainer": {"use_v1": True, "nnodes": 1, "n_gpus_per_node": 2,
                          "v1": {"trainer_mode": "colocate_async", "colocate_async": {"num_warmup_batches": 1}}}}
    values |= {"data": {"train_batch_size": batch}} if batch else {
        ASYNC: {"staleness_threshold": 0.5} | ({"concurrent_samples_per_replica": concurrent} if concurrent else {})}
    module = "verl.trainer.main_ppo" if batch else "verl.experimental.fully_async_policy.fully_async_main"
    found = list(rules.server_slots(rules.Config(values, frozenset(), module, "0.9.1", "cuda", False)))
    assert [(severity, key) for severity, key, *_ in found] == ([("warning", named)] if named else [])


@pytest.mark.parametrize("change, named", [
    ({}, []), ({"batch": 1000}, ["data.train_batch_size"]),
    ({"nnodes": 0}, ["actor_rollout_ref.rollout.nnodes"]), ({"gpus": 0}, ["actor_rollout_ref.rollout.n_gpus_per_node"]),
    ({"backend": "naive"}, ["actor_rollout_ref.rollout.checkpoint_engine.backend"]),
    ({"mode": "colocate_async", "batch": 1000, "nnodes": 0, "backend": "naive"}, [])])
def test_what_separate_async_asserts(change, named):
    """Before the first step: verl would have started Ray, and said it in a traceback."""
    of = {"batch": 1024, "nnodes": 1, "gpus": 4, "backend": "nccl", "mode": "separate_async", **change}
    values = {"data": {"train_batch_size": of["batch"]}, "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 256},
        "rollout": {"nnodes": of["nnodes"], "n_gpus_per_node": of["gpus"], "checkpoint_engine": {
            "backend": of["backend"]}}},
        "trainer": {"use_v1": True, "v1": {"trainer_mode": of["mode"], "separate_async": {"parameter_sync_step": 4}}}}
    config = rules.Config(values, frozenset(), "verl.trainer.main_ppo", "0.9.1", "cuda", False)
    found = list(rules.separate_async_contract(config))
    assert [(severity, key) for severity, key, *_ in found] == [("error", key) for key in named]


def test_segments_where_the_overlay_has_no_place(newest):
    variables = {"SEGMENT": "True", "VERL": "0.8.0", **HOME}
    errors = found(check.lint(RECIPES / "fully_async.sh", str(pristine("verl", "v0.8.0")), variables), "error")
    assert "does not start with verl 0.8.0" in errors["actor_rollout_ref.rollout.segment"].problem


def test_the_command_line(newest, tmp_path, capsys):
    assert cli.main(["lint", str(CUT), "--verl", newest, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {"line", "severity", "key", "problem", "todo"} == set(rows[0])
    assert cli.main(["lint", str(RECIPES / "fully_async.sh"), "HOME=/h", "--verl", newest]) == 0
    empty = tmp_path / "empty.sh"
    empty.write_text("echo hello\n")
    assert cli.main(["lint", str(empty)]) == 2 and "no launch of verl" in capsys.readouterr().err
    assert cli.main(["lint", str(CUT), "what"]) == 2


def test_without_hydra_names_are_still_checked(newest, monkeypatch):
    monkeypatch.setattr(release.util, "find_spec", lambda name: None)
    result = check.lint(RECIPES / "fully_async.sh", newest, HOME)
    assert found(result, "note")["hydra"] and not found(result, "error")
    assert [f.severity for f in check.lint(CUT, newest).findings].count("error") >= 1


# ---- verl's own scripts are correct by definition: no false error

ASYNC_SHELL, STEP_SHELL = "fully_async_policy/shell", "one_step_off_policy/shell"
UPSTREAM = [(tag, f"{folder}/{name}") for tag, folder, names in (
    ("v0.7.0", f"recipe/{ASYNC_SHELL}", ("dapo_7b_math_fsdp2_4_4.sh", "dapo_7b_math_fsdp2_64_64_mis.sh",
                                         "grpo_30b_a3b_base_math_megatron_96_32.sh")),
    ("v0.7.0", f"recipe/{STEP_SHELL}", ("grpo_qwen3_8b_gsm8k_fsdp2_8_8_npu.sh", "dapo_7b_math_megatron_4_12.sh")),
    ("v0.8.0", f"verl/experimental/{ASYNC_SHELL}", ("dapo_7b_math_fsdp2_8_8.sh",)),
    ("v0.8.0", f"verl/experimental/{STEP_SHELL}", ("grpo_0.6b_gsm8k_fsdp2_2_6.sh",)),
    ("v0.9.0", f"verl/experimental/{ASYNC_SHELL}", ("dapo_7b_math_fsdp2_4_4.sh", "grpo_qwen3_235b_megatron_npu.sh",
                                                    "geo3k_qwen3vl_8b_fsdp2_16_16_npu.sh")),
    ("v0.9.0", f"verl/experimental/{STEP_SHELL}", ("dapo_7b_math_fsdp2_colocate.sh",)),
    ("v0.9.0", "tests/special_e2e", ("run_fully_async_policy.sh", "run_one_step_off_policy.sh")),
    ("v0.9.0", "examples/grpo_trainer", ("run_qwen3_8b_fsdp.sh", "run_deepseek_v3_671b_megatron.sh")),
) for name in names]
# upstream's own mistakes, which verl and bash confirm
BROKEN = {("v0.9.0", f"verl/experimental/{ASYNC_SHELL}/geo3k_qwen25vl_7b_megatron_4_4.sh"): "line continuation",
          ("v0.9.0", "examples/tuning/lora/run_qwen3_8b_merge_fsdp.sh"): "actor_rollout_ref.model.lora.merge"}


def from_git(tag: str, name: str, directory: Path) -> Path:
    repository = os.environ.get(upstreams.VERL_GIT)
    if not repository:
        pytest.skip(f"{upstreams.VERL_GIT} names no clone of verl: wheels have no launch scripts")
    text = subprocess.run(["git", "-C", repository, "show", f"{tag}:{name}"], capture_output=True, check=True).stdout
    (directory / "run.sh").write_bytes(text)
    return directory / "run.sh"


@pytest.mark.slow
@pytest.mark.parametrize("tag, name", UPSTREAM, ids=[f"{tag}-{name.rpartition('/')[2]}" for tag, name in UPSTREAM])
def test_no_false_error_in_verls_own_scripts(tag, name, tmp_path):
    result = check.lint(from_git(tag, name, tmp_path), tag[1:])
    assert [str(f) for f in result.findings if f.severity == "error"] == []
    assert "not composed" not in result.checked[0]


@pytest.mark.slow
@pytest.mark.parametrize("tag, name", BROKEN, ids=[name.rpartition("/")[2] for _, name in BROKEN])
def test_true_errors_in_verls_own_scripts(tag, name, tmp_path):
    assert set(found(check.lint(from_git(tag, name, tmp_path), tag[1:]), "error")) == {BROKEN[tag, name]}


def test_a_patched_checkout_needs_no_flash_attention_argument(tmp_path):
    source = pristine("verl", "v0.7.0")
    shutil.copytree(source / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("models", "tools", "utils"))
    shutil.copytree(source / "recipe" / "fully_async_policy", tmp_path / "recipe" / "fully_async_policy")
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn"
    assert key in found(check.lint(CUT, str(tmp_path)), "error")  # negative control
    workers = Path("verl/workers/megatron_workers.py")
    subprocess.run(["git", "apply", f"--include={workers}", str(
        ROOT / "patches" / "verl" / "v0.7.0" / "default-flash-attention-under-mindspeed.patch")],
        cwd=tmp_path, check=True)
    assert key not in found(check.lint(CUT, str(tmp_path)), "error")


def test_an_applied_patch_is_seen_in_the_tree(tmp_path):
    """After ./apply.sh nobody is told to apply it; before, and after an edit, it is not taken for applied."""
    tree("verl", "v0.7.0", [], tmp_path / "plain", tuple(touched(patch_file("verl", "v0.7.0", rules.HCCL_PATCH))))
    assert not release.Release("0.7.0", tmp_path / "plain").has_patch(rules.HCCL_PATCH)
    tree("verl", "v0.7.0", [rules.HCCL_PATCH], tmp_path / "patched")
    assert release.Release("0.7.0", tmp_path / "patched").has_patch(rules.HCCL_PATCH)
    assert not release.Release("0.9.1", tmp_path / "patched").has_patch(rules.HCCL_PATCH)  # a patch of 0.7.0
    name = touched(patch_file("verl", "v0.7.0", rules.HCCL_PATCH))[0]
    with open(tmp_path / "patched" / name, "a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert not release.Release("0.7.0", tmp_path / "patched").has_patch(rules.HCCL_PATCH)
