"""Every metric of verl that esgrpo explains is in the source of the pinned releases, and none of theirs is missing."""

import ast
import re
from pathlib import Path

import pytest

from ci.tests.contract.patched import pristine
from esgrpo import compat
from esgrpo.tools.explain import report

FULLY_ASYNC, VERL = report.FILES
VERSIONS = ("0.7.0", "0.9.0", "0.9.1")  # those in which the overlay runs
GROUPS = r"(static|count|monitor|partial|processing_time|rollouter|trainer)/"
STEP_VERSIONS = ("0.7.0", "0.9.1")
STEP_SOURCES = (  # where verl's trainers get their step metrics from
    "trainer/ppo", "trainer/distillation", "workers/utils/losses.py", "workers/engine_workers.py", "workers/actor",
    "workers/critic", "workers/fsdp_workers.py", "workers/megatron_workers.py", "experimental/agent_loop",
    "experimental/separation", "experimental/one_step_off_policy", "experimental/fully_async_policy",
    "utils/debug/metrics.py")
METRIC = re.compile(r"[A-Za-z_{}][\w{}-]*(/[\w{}@.-]+)+")
PREFIXES = ("training", "rollout/moe", "global_seqlen")  # what stands for a {} that names begin with
NO_METRIC = {"rollout/moe", "_staleness/mean", "fully_async/{}"}  # parts that names are put together from


def package(version: str) -> Path:
    root = pristine("verl", f"v{version}")
    new = root / "verl" / "experimental" / "fully_async_policy"
    return new if new.is_dir() else root / "recipe" / "fully_async_policy"


def literals(folder: Path) -> set[str]:
    return {node.value for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def step_metrics(version: str) -> dict[str, str]:
    """What reads like the name of a metric in the sources of verl's trainers, {} for expressions, with its file."""
    root, found = pristine("verl", f"v{version}") / "verl", {}
    for place in (root / source for source in STEP_SOURCES):
        for file in [place] if place.suffix else sorted(place.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
                else:
                    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if METRIC.fullmatch(text) and text not in NO_METRIC:
                    found[text] = str(file.relative_to(root))
    return found


@pytest.mark.parametrize("version", STEP_VERSIONS)
def test_every_step_metric_in_the_source_is_explained(version):
    names = step_metrics(version)
    assert {"critic/score/mean", "response_length/clip_ratio", "actor/ppo_kl", "timing_s/{}"} <= set(names)
    assert {name: file for name, file in names.items()
            if not any(report.find(prefix + name.removeprefix("{}").replace("{}", "x")) for prefix in (
                PREFIXES if name.startswith("{}") else ("",)))} == {}


def test_step_metrics_that_are_explained_are_in_the_source():
    """The last part of every name stands in the newest release that has it, as a whole word."""
    texts = {}
    for version in STEP_VERSIONS:
        root = pristine("verl", f"v{version}") / "verl"
        texts[version] = "\n".join(file.read_text() for file in root.rglob("*.py"))
        words = set(re.findall(r"\w+", texts[version]))
        for pattern, entry in compat.toml(VERL).items():
            if version == max(entry.get("verl", STEP_VERSIONS)):
                for name in report.expand(pattern):
                    last = name.rpartition("/")[2]
                    assert last.startswith("<") or last.partition("_<")[0] in words, f"{name} in {version}"
                assert re.search(rf"(class|def) {entry['where']}\b", texts[version]), f"{pattern}: {entry['where']}"


def of_verl(version: str) -> list[str]:
    return [name for pattern, entry in compat.toml(FULLY_ASYNC).items() for name in report.expand(pattern)
            if not name.startswith("esgrpo/") and version in entry.get("verl", VERSIONS)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_explained_name_is_in_the_source(version):
    found = literals(package(version))
    short = {name.removeprefix("fully_async/") for name in found}
    names = of_verl(version)
    if version == "0.9.0":  # the utilisation of 0.9.1 is explained as such
        assert not any(name.startswith("dynamic_resource/rollout") for name in names)
    # the rollouter of newer releases counts no versions, the trainer does
    assert [name for name in names if name.removeprefix("fully_async/") not in short] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_statistic_in_the_source_is_explained(version):
    names = {name for name in literals(package(version)) if re.fullmatch(rf"(fully_async/)?{GROUPS}[\w/]+", name)}
    assert len(names) > 10
    assert [name for name in names if report.find(name) is None] == []


def test_symbols_exist_in_the_newest_release_that_has_the_metric():
    for pattern, entry in compat.toml(FULLY_ASYNC).items():
        if not pattern.startswith("esgrpo/"):
            source = "\n".join(f.read_text() for f in package(max(entry.get("verl", VERSIONS))).glob("*.py"))
            for symbol in re.findall(r"[A-Za-z_]\w+", entry["where"].replace(" and ", " ")):
                assert re.search(rf"(class|def) {symbol}\b", source), f"{pattern}: {symbol}"
