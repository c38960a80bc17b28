"""Every metric of verl that esgrpo explains is in the source of the pinned releases, and none of theirs is missing."""

import ast
import re
from pathlib import Path

import pytest

from ci.tests.contract.patched import pristine
from esgrpo.tools.explain import report

VERSIONS = ("0.7.0", "0.9.0", "0.9.1")  # those in which the overlay runs
GROUPS = r"(static|count|monitor|partial|processing_time|rollouter|trainer)/"
NOT_EXPLAINED = {"rollouter/validate_time"}  # a timing like all others


def package(version: str) -> Path:
    root = pristine("verl", f"v{version}")
    new = root / "verl" / "experimental" / "fully_async_policy"
    return new if new.is_dir() else root / "recipe" / "fully_async_policy"


def literals(folder: Path) -> set[str]:
    return {node.value for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def of_verl(version: str) -> list[str]:
    return [name for pattern, entry in report.load().items() for name in report.expand(pattern)
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
    assert [name for name in names - NOT_EXPLAINED if report.find(name) is None] == []


def test_symbols_exist_in_the_newest_release_that_has_the_metric():
    for pattern, entry in report.load().items():
        if not pattern.startswith("esgrpo/"):
            source = "\n".join(f.read_text() for f in package(max(entry.get("verl", VERSIONS))).glob("*.py"))
            for symbol in re.findall(r"[A-Za-z_]\w+", entry["where"].replace(" and ", " ")):
                assert re.search(rf"(class|def) {symbol}\b", source), f"{pattern}: {symbol}"
