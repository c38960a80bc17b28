"""The listing of bench/ says what can be run: modules right there are commands, bench/common has none of them."""

from __future__ import annotations

import ast
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "bench"
COMMANDS = {path.stem: path for path in BENCH.glob("*.py") if path.stem != "__init__"}
LIBRARIES = [*BENCH.glob("common/*.py"), *BENCH.glob("policies/*.py")]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def runs(path: Path) -> bool:
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
               for node in ast.parse(path.read_text(encoding="utf-8")).body)


def test_a_module_of_bench_is_a_command_and_none_of_the_libraries_is():
    assert COMMANDS and all(runs(path) for path in COMMANDS.values())
    assert [str(path) for path in LIBRARIES if runs(path)] == []


def test_nobody_in_bench_imports_a_command():
    commands = {f"bench.{name}" for name in COMMANDS}
    assert {str(path): found for path in BENCH.rglob("*.py") if (found := imported(path) & commands)} == {}
