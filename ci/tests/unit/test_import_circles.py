"""No module needs itself by way of others: what an import can reach has an order, also inside functions."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "overlay" / "esgrpo"


def modules(package: Path) -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that `name` imports anywhere, but for annotations. Not itself: a hook that Ray ships by
    value asks for its own module by name."""
    found = set()
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    annotations = {id(below) for node in tree.body if isinstance(node, ast.If)
                   and ast.unparse(node.test) == "TYPE_CHECKING" for below in node.body}
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[:len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            full = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            found |= {full[alias] if full[alias] in known else base for alias in full}
    return found & known.keys() - {name}


def circle(package: Path) -> list[str]:
    """Modules of a circle, the first one again at the end; empty when there is none."""
    known = modules(package)
    graph = {name: imported(name, path, known) for name, path in known.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert circle(PACKAGE) == []


@pytest.mark.parametrize("text", ["from made import one", "import made.one", "from . import one", "from .one import X",
                                  "def f():\n    from made.one import X"])
def test_a_circle_is_found_however_it_is_written(tmp_path, text):
    made = tmp_path / "made"
    made.mkdir()
    (made / "__init__.py").write_text("")
    (made / "one.py").write_text("def f():\n    import made.two\n")
    (made / "two.py").write_text("import made.two, json\n")
    assert circle(made) == []
    (made / "two.py").write_text(text)
    assert set(circle(made)) == {"made.one", "made.two"}


def test_a_run_imports_nothing_of_what_a_person_asks_for_beside_it():
    known = modules(PACKAGE)
    inside = {name for name in known if name.startswith("esgrpo.tools")}
    asking = {name for name, path in known.items() if imported(name, path, known) & inside}
    assert asking - inside == {"esgrpo.cli"}
