"""The matrix and `esgrpo drift`: what is damaged turns red and is named, and nothing else does."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from ci.matrix import __main__ as driver  # noqa: E402
from ci.matrix import cells, lanes  # noqa: E402
from esgrpo import compat, engine, fingerprint, recorded  # noqa: E402
from esgrpo.errors import EsgrpoError  # noqa: E402
from esgrpo.tools import drift  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
RELEASES = {"verl": "0.9.1", "vllm": "0.28.0"}
HOOKS = [record.hook for record in engine.load_hooks().values()
         if RELEASES.get(record.hook.upstream) in recorded.of_hook(record.hook).fingerprints]


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, Path]:
    """Copies of the installed upstreams, Python only."""
    found = {}
    for name in RELEASES:
        package = Path(importlib.util.find_spec(name).origin).parent
        found[name] = tmp_path_factory.mktemp(name)
        shutil.copytree(package, found[name] / name, ignore=lambda directory, names: [
            n for n in names if not n.endswith(".py") and not os.path.isdir(os.path.join(directory, n))])
    return found


def damage(path: Path, qualname: str) -> None:
    """One line more at the end of the definition."""
    node = fingerprint.find_nodes(str(path), qualname)[0]
    last = node.body[-1]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first = last.lineno - 1 - len(getattr(last, "decorator_list", []))
    lines.insert(first, " " * last.col_offset + "_damaged = None\n")
    path.write_text("".join(lines), encoding="utf-8")
    ast.parse(path.read_text(encoding="utf-8"))


def test_undamaged_trees_are_green(trees):
    for upstream, version in RELEASES.items():
        outcome = cells.fingerprints_in(upstream, version, trees[upstream])
        assert outcome.state == cells.PASS, outcome.evidence


def test_a_cell_says_how_many_hooks_act_and_is_red_when_the_count_is_wrong(trees, monkeypatch):
    """The count of the table is taken from what is recorded: a hook that acts must be recorded, and the other way."""
    version, hooks = RELEASES["verl"], recorded.of_upstream("verl").hooks
    said = cells.fingerprints_in("verl", version, trees["verl"]).evidence[0]
    acting, of = drift.acting("verl", version)
    assert said == f"{acting} of {of} hooks act" and acting == of > 1
    source = hooks["trained-rows"].fingerprints[version]
    monkeypatch.setitem(hooks, "trained-rows", recorded.Recorded({"0.9.0": source}))
    assert drift.acting("verl", version) == (acting - 1, of)
    outcome = cells.fingerprints_in("verl", version, trees["verl"])
    assert outcome.state == cells.FAIL and outcome.evidence[0].startswith("trained-rows: acts here and is not recorded")
    monkeypatch.setitem(hooks, "trained-rows", recorded.Recorded({"0.9.0": "0" * 16}))
    outcome = cells.fingerprints_in("verl", version, trees["verl"])
    assert outcome.state == cells.PASS and outcome.evidence[0] == f"{acting - 1} of {of} hooks act"


@pytest.mark.parametrize("hook", HOOKS, ids=[hook.slug for hook in HOOKS])
def test_one_changed_line_turns_its_cell_red_and_names_the_hook(trees, hook):
    version = RELEASES[hook.upstream]
    module, _, qualname = hook.target.partition(":")
    path = Path(fingerprint.source_file(module, [str(trees[hook.upstream])]))
    text = path.read_text(encoding="utf-8")
    try:
        damage(path, qualname)
        outcome = cells.fingerprints_in(hook.upstream, version, trees[hook.upstream])
        assert outcome.state == cells.FAIL
        assert any(line.startswith(f"{hook.slug}: ") for line in outcome.evidence), outcome.evidence
        state, _ = drift.compare_target(hook.target, Path(importlib.util.find_spec(hook.upstream).origin).parents[1],
                                        trees[hook.upstream])
        assert state == drift.CHANGED
    finally:
        path.write_text(text, encoding="utf-8")


def test_what_is_damaged_is_whole_again(trees):
    """Nothing of the tests above is left, and no cell of one upstream looks at the other's tree."""
    test_undamaged_trees_are_green(trees)
    for upstream, version in RELEASES.items():
        other = next(name for name in RELEASES if name != upstream)
        hook = next(hook for hook in HOOKS if hook.upstream == upstream)
        path = Path(fingerprint.source_file(hook.target.partition(":")[0], [str(trees[upstream])]))
        text = path.read_text(encoding="utf-8")
        try:
            damage(path, hook.target.partition(":")[2])
            assert cells.fingerprints_in(upstream, version, trees[upstream]).state == cells.FAIL
            assert cells.fingerprints_in(other, RELEASES[other], trees[other]).state == cells.PASS
        finally:
            path.write_text(text, encoding="utf-8")


def test_a_moved_and_a_gone_target(trees, tmp_path):
    hook = next(hook for hook in HOOKS if hook.slug == "trained-rows")
    module, _, qualname = hook.target.partition(":")
    tree = tmp_path / "tree"
    shutil.copytree(trees["verl"], tree)
    path = Path(fingerprint.source_file(module, [str(tree)]))
    moved = path.with_name("moved_elsewhere.py")
    path.rename(moved)
    state, lines = drift.compare_target(hook.target, trees["verl"], tree)
    assert state == drift.MOVED and "moved_elsewhere" in lines[0]
    moved.unlink()
    assert drift.compare_target(hook.target, trees["verl"], tree)[0] == drift.GONE


@pytest.mark.parametrize("text", ["vllm", "vllm>=0.1", "nothing==1", "vllm==", "!!"])
def test_unusable_requirements(text):
    with pytest.raises(EsgrpoError) as caught:
        drift.requirement(text)
    assert str(caught.value).count("|") == 3


@pytest.fixture
def only(trees, monkeypatch):
    """The index has the tested release alone: every other one, each reference too, is not to be had."""
    def sources(upstream, version, say=print):
        if version != RELEASES[upstream]:
            raise drift.upstreams.Unavailable(f"{upstream} {version}", "not here", "a wheel", "not run", "nothing")
        return trees[upstream]

    monkeypatch.setattr(drift.upstreams, "sources", sources)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


def rows_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+) (\S+) \(\S+ \S+\)$", text, re.MULTILINE))


@pytest.mark.parametrize("upstream, elsewhere", [("vllm", "segment-scheduler-by-class"), ("verl", "partial-attempts")])
def test_drift_of_a_tested_release_exits_0(only, capsys, upstream, elsewhere):
    """Hooks of other releases have no place in it, and their references are not asked for."""
    assert drift.main([f"{upstream}=={RELEASES[upstream]}"]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert rows[elsewhere] == drift.NOT_NEEDED and set(rows.values()) == {drift.NOT_NEEDED, drift.UNCHANGED}
    assert list(rows.values()).count(drift.UNCHANGED) == sum(hook.upstream == upstream for hook in HOOKS)
    assert "not here" not in out
    first = out.splitlines()[0]
    assert first.startswith(f"{upstream} {RELEASES[upstream]}: ") and first.endswith("Nothing to do")


def test_a_release_that_the_overlay_leaves_out_is_said_first(trees, monkeypatch, capsys):
    """Hooks meant for newer releases are not needed in it, and are not called changed or gone."""
    installed = Path(importlib.util.find_spec("verl").origin).parents[1]
    monkeypatch.setattr(drift.upstreams, "sources", lambda upstream, version, say=print: (
        trees["verl"] if version in ("0.8.0", "0.9.2") else installed))
    hook = next(hook for hook in HOOKS if hook.slug == "driver-start")
    path = Path(fingerprint.source_file(hook.module, [str(trees["verl"])]))
    text = path.read_text(encoding="utf-8")
    try:
        damage(path, hook.target.partition(":")[2])
        assert drift.main(["verl==0.8.0"]) == 1
        out = capsys.readouterr().out
        assert out.startswith("verl 0.8.0: the overlay is not made for it, only for verl ==0.7.0, >=0.9,<0.10")
        assert rows_of(out)["driver-start"] == drift.NOT_NEEDED
        assert set(rows_of(out).values()) == {drift.NOT_NEEDED, drift.UNCHANGED}
        assert drift.main(["verl==0.9.2"]) == 1  # one that it is made for is compared
        assert rows_of(capsys.readouterr().out)["driver-start"] == drift.CHANGED
    finally:
        path.write_text(text, encoding="utf-8")


CURED = {  # what upstream would write: text that is replaced, in the source of the place
    "abort-by-external-id": ("self.engine.output_processor.abort_requests(", "self.engine.abort("),
    "resume-without-sleep": ("asyncio.sleep", "asyncio.wait"),
    "rollouter-failure-is-loud": ("return_exceptions=True", ""),
    "segment-config-key": ("class RolloutConfig(BaseConfig):",
                           "class RolloutConfig(BaseConfig):\n    segment: dict = None"),
    "stop-after-step": ("import asyncio", "import asyncio\nfrom signal import SIGTERM"),
    "server-slots": ("import asyncio", "import asyncio\nconcurrency_group = 1"),
}


def place_of(slug: str, tree: Path) -> Path:
    hook = engine.load_hooks()[slug].hook
    return Path(fingerprint.source_file(drift._cures()[slug].get("place", hook.target).partition(":")[0], [str(tree)]))


@pytest.mark.parametrize("slug", sorted(drift._cures()))
def test_no_cure_is_seen_in_a_tested_release(slug):
    """Negative control: every check reads a source that is there, and the hook is needed in it."""
    hook = engine.load_hooks()[slug].hook
    tree = Path(importlib.util.find_spec(hook.upstream).origin).parents[1]
    place = drift._cures()[slug].get("place", hook.target)
    module, _, qualname = place.partition(":")
    path = fingerprint.source_file(module, [str(tree)])
    assert path and (not qualname or fingerprint.find_nodes(path, qualname)), place
    assert drift.cured_upstream(hook, tree) == ""


@pytest.mark.parametrize("slug", CURED)
def test_a_hook_whose_reason_is_gone_is_cured_upstream(slug, trees, tmp_path, monkeypatch, capsys):
    tree = tmp_path / "tree"
    shutil.copytree(trees["verl"], tree)
    hook, path = engine.load_hooks()[slug].hook, place_of(slug, tree)
    before, after = CURED[slug]
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    said = drift.cured_upstream(hook, tree)
    assert hook.remove_when in said
    damage(Path(fingerprint.source_file(hook.module, [str(tree)])), hook.target.partition(":")[2])
    assert drift._verdict(hook, "0.9.9", tree, print).state == drift.CURED


def test_vllm_ascend_is_answered_by_its_scheduler_classes(tmp_path, monkeypatch, capsys):
    source = "class AscendScheduler(Scheduler):\n    def schedule(self):\n        return {}\n"
    for version, text in {"0.18.0": source.format(1), "0.18.1": source.format(1) + "x = 2\n",
                          "0.19.0": source.format(2) + "SchedulerConfig.get_scheduler_cls = None\n"}.items():
        core = tmp_path / version / "vllm_ascend" / "core"
        core.mkdir(parents=True)
        for folder in (core, core.parent):
            (folder / "__init__.py").write_text("")
        (core / "scheduler.py").write_text("\ufeff" + text, encoding="utf-8")
    monkeypatch.setattr(drift.upstreams, "sources", lambda upstream, version, say=print: tmp_path / version)
    name = "vllm_ascend.core.scheduler:AscendScheduler"
    assert drift.main(["vllm-ascend==0.18.1"]) == 0
    out = capsys.readouterr().out
    assert rows_of(out)[name] == drift.UNCHANGED and "esgrpo drift vllm==0.18.1" in out.splitlines()[0]
    assert drift.main(["vllm-ascend==0.19.0"]) == 1
    out = capsys.readouterr().out
    assert rows_of(out)[name] == drift.CHANGED and "1 of 1 scheduler classes differ" in out.splitlines()[0]
    assert "replaces vllm.config.scheduler:SchedulerConfig.get_scheduler_cls" in out


def test_drift_in_chinese(only, capsys):
    from esgrpo import cli

    assert cli.main(["drift", "--lang", "zh", "vllm==0.28.0"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("无需处理")
    for name, texts in compat.toml(drift.TEXTS).items():
        fields = [sorted(part[1] for part in string.Formatter().parse(texts[key]) if part[1]) for key in ("en", "zh")]
        assert set(texts) == {"en", "zh"} and fields[0] == fields[1], name


def test_drift_says_a_missing_reference_in_the_row_of_its_hook(only, trees, tmp_path, monkeypatch, capsys):
    hook = next(hook for hook in HOOKS if hook.slug == "trained-rows")
    module, _, qualname = hook.target.partition(":")
    changed = tmp_path / "verl-0.9.9"
    shutil.copytree(trees["verl"], changed)
    damage(Path(fingerprint.source_file(module, [str(changed)])), qualname)

    def sources(upstream, version, say=print):
        if version != "0.9.9":
            raise drift.upstreams.Unavailable(f"{upstream} {version}", "not here", "a wheel", "not run", "nothing")
        return changed

    monkeypatch.setattr(drift.upstreams, "sources", sources)
    assert drift.main(["verl==0.9.9", "verl==0.9.8"]) == drift.UNUSABLE  # 0.9.8 cannot be had, 0.9.9 is answered
    out, errors = capsys.readouterr()
    assert rows_of(out)["trained-rows"] == drift.CHANGED and rows_of(out)["prompt-queue"] == drift.UNCHANGED
    assert "no sources of 0.9.1 to compare with" in out and errors.startswith("esgrpo: verl 0.9.8: ")
    assert drift.main(["verl==0.9.9"]) == 1


def test_drift_counts_the_hooks_of_the_testbed_where_it_is_used(trees, tmp_path, monkeypatch, capsys):
    hook = next(hook for hook in HOOKS if hook.slug == "cpu-linear-reloads")
    module, _, qualname = hook.target.partition(":")
    changed = tmp_path / "tree"
    shutil.copytree(trees["vllm"], changed)
    damage(Path(fingerprint.source_file(module, [str(changed)])), qualname)
    monkeypatch.setattr(drift.upstreams, "sources",
                        lambda upstream, version, say=print: changed if version == "0.28.1" else trees[upstream])
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert drift.main(["vllm==0.28.1"]) == 0
    out = capsys.readouterr().out
    assert rows_of(out)[hook.slug] == drift.CHANGED and "VERL_PLATFORM=cpu counts it" in out
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert drift.main(["vllm==0.28.1"]) == 1


@pytest.mark.parametrize("present, used", [(["uv", "pip"], "uv"), (["pip"], "pip"), ([], None)])
def test_a_download_without_pip_in_this_environment(tmp_path, monkeypatch, present, used):
    """uv's environments have none. The programs on PATH write down how they were called and make the wheel."""
    for name in present:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\nimport sys, zipfile\n"
                           f"open({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv))\n"
                           "directory = sys.argv[sys.argv.index('--dest') + 1]\nimport os\nos.makedirs(directory)\n"
                           "zipfile.ZipFile(directory + '/up.whl', 'w').writestr('up/__init__.py', '')\n")
        program.chmod(0o755)
    real = importlib.util.find_spec
    monkeypatch.setattr(drift.upstreams.importlib.util, "find_spec",
                        lambda name, *rest: None if name == "pip" else real(name, *rest))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ESGRPO_CACHE", str(tmp_path / "cache"))
    if used is None:
        with pytest.raises(drift.upstreams.Unavailable, match="neither uv nor pip"):
            drift.upstreams.sources("up", "1.0")
        return
    assert (drift.upstreams.sources("up", "1.0") / "up" / "__init__.py").exists()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(str(tmp_path / "bin" / used)) and asked.endswith("up==1.0")
    assert ("tool run --quiet --python" in asked) == (used == "uv")


def test_the_reference_is_the_nearest_tested_release_first():
    known = {"0.8.0": "", "0.9.1": "", "0.9.1+series": "", "0.10.0": ""}
    assert drift.tested_references(known, "0.9.5") == ["0.9.1", "0.8.0", "0.10.0"]
    assert drift.tested_references({"0.8.0": ""}, "0.7.0") == ["0.8.0"]


def test_a_damaged_patch_turns_its_apply_cell_red(trees, tmp_path):
    directory = tmp_path / "verl" / "v0.9.1"
    shutil.copytree(ROOT / "patches" / "verl" / "v0.9.1", directory)
    tree = tmp_path / "tree"
    shutil.copytree(trees["verl"], tree)
    assert cells.apply_and_reverse(directory, tree).state == cells.PASS
    patch = next(directory.glob("*.patch"))
    text = patch.read_text()
    added = next(line for line in text.splitlines() if line.startswith("+ ") and line.strip("+ "))
    patch.write_text(text.replace(added, added + "  # damaged", 1))
    with pytest.raises(cells.patchset.PatchError, match="verl v0.9.1"):
        cells.apply_and_reverse(directory, tree)


def test_a_module_in_a_lane_is_a_module_in_a_new_interpreter(tmp_path, monkeypatch):
    """Also after one that failed."""
    (tmp_path / "probe.py").write_text("import os, sys\nprint(sorted(n for n in os.environ if n.startswith('ESGRPO')), "
                                       "sys.argv[1:], 'verl' in sys.modules)\nprint('said', file=sys.stderr)\n")
    (tmp_path / "fails.py").write_text("raise SystemExit('on purpose')\n")
    monkeypatch.delenv(lanes.LANE, raising=False)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "ESGRPO_X": "1"}

    def run(module):
        done = lanes.run(module, environment)
        return done.returncode, done.stdout, done.stderr

    new, lane = (run("probe"), run("fails")), lanes.Lane()
    try:
        monkeypatch.setenv(lanes.LANE, lane.options()["env"][lanes.LANE])
        assert (run("probe"), run("fails"), run("probe")) == (*new, new[0])
    finally:
        lane.end()
    assert new == ((0, "['ESGRPO_X'] [] False\n", "said\n"), (1, "", "on purpose\n"))


def test_the_content_key_follows_row_and_files(monkeypatch, tmp_path):
    row = next(row for row in compat.load() if row.cell == "apply-only-ray-2.51.1")
    key = driver.key_of(row)
    assert driver.key_of(row) == key
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    assert driver.key_of(row) != key


def test_a_cell_that_cannot_be_had_is_not_run_and_never_passed(tmp_path):
    environment = {**os.environ, "ESGRPO_CACHE": str(tmp_path), "PYTHONPATH": f"{ROOT / 'overlay'}{os.pathsep}{ROOT}"}
    environment.pop("ESGRPO_VERL_GIT", None)
    result = subprocess.run([sys.executable, "-m", "ci.matrix", "--only", "apply-only-verl-0.7.0", "--out",
                             str(tmp_path / "out")], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "0 pass, 0 fail, 1 not run" in result.stdout
    assert "not in this distribution: not run" in (tmp_path / "out" / "matrix.md").read_text()
    result = subprocess.run([sys.executable, "-m", "ci.matrix", "--only", "no-such-cell"], cwd=ROOT, env=environment,
                            capture_output=True, text=True)
    assert result.returncode == 1 and "no cell no-such-cell" in result.stderr
