"""Fingerprints of upstream source: a hash of the normalised AST, computed without importing upstream.

The same text gives the same fingerprint under Python 3.10 to 3.13: positions, docstrings, comments, empty and
absent fields are left out, so that a reformatted or re-commented target counts as unchanged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys

_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_ignores"})
_HASH_LENGTH = 16


def _without_docstring(body: list) -> list:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _normalise(node) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_normalise(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = _without_docstring(value)
        if name == "values" and isinstance(node, ast.JoinedStr):  # 3.12 ends a nested format spec with an empty string
            value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
        if name in _SKIPPED_FIELDS or value is None or value == []:
            continue
        parts.append(f"{name}={_normalise(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def of_node(node: ast.AST) -> str:
    """Fingerprint of one AST node: 16 hexadecimal digits."""
    return hashlib.sha256(_normalise(node).encode()).hexdigest()[:_HASH_LENGTH]


@functools.lru_cache(maxsize=64)
def _tree(path: str, _mtime: float) -> ast.Module:
    with open(path, encoding="utf-8-sig") as file:  # a byte order mark is no source
        return ast.parse(file.read())


def _find_spec(name: str, locations: list[str] | None):
    """PathFinder inside a package; at the top level every finder is asked: an editable install has its own."""
    if locations is not None:
        return importlib.machinery.PathFinder.find_spec(name, locations)
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a loaded module without a spec
        return importlib.machinery.PathFinder.find_spec(name)


def source_file(module: str, search: list[str] | None = None) -> str | None:
    """Path of a module's source, found through sys.path (or `search`) without importing it or its parents."""
    locations = search
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = parts[depth]
        spec = _find_spec(name, locations)
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or [])
        if depth < len(parts) - 1 and not locations:
            return None
    return spec.origin if spec and spec.origin and spec.origin.endswith(".py") else None


def _definitions(node: ast.AST):
    """Classes and functions defined directly in `node`, also under if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from _definitions(child)


HEADER = "__bases__"  # as the last name of a target: what the class is made of besides its body


def _bound(target: ast.AST) -> str:
    """Dotted name that an assignment's target stands for; empty for anything but names and their attributes."""
    if isinstance(target, ast.Name):
        return target.id
    owner = _bound(target.value) if isinstance(target, ast.Attribute) else ""
    return f"{owner}.{target.attr}" if owner else ""


def _names_bound_by(statement: ast.stmt) -> set[str]:
    """Dotted names that a statement binds anew: assignments, imports, deletions and setattr."""
    if isinstance(statement, (ast.Assign, ast.Delete)):
        places = [part for t in statement.targets for part in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
        return set(map(_bound, places))
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return {_bound(statement.target)}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    call = statement.value if isinstance(statement, ast.Expr) else None
    if (isinstance(call, ast.Call) and _bound(call.func) == "setattr" and len(call.args) == 3
            and isinstance(call.args[1], ast.Constant)):
        return {f"{_bound(call.args[0])}.{call.args[1].value}"}
    return set()


def _statements(node: ast.AST):
    """Statements that run when `node`'s body does, also under if, for, try and with, but not those of definitions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from _statements(child)


def _rebindings(tree: ast.Module, qualname: str) -> list[ast.AST]:
    """Statements that put something else in the place of `qualname` or of a class that it belongs to."""
    *owners, name = qualname.split(".")
    found, bodies, outer = [], [tree], list(owners)
    for depth in range(len(owners) + 1):
        inside = [*outer[depth:], name]  # the target, as this body names it
        places = {".".join(inside[:length]) for length in range(1, len(inside) + 1)}
        found += [s for body in bodies for s in _statements(body) if not places.isdisjoint(_names_bound_by(s))]
        if depth < len(owners):
            bodies = [child for body in bodies for child in _definitions(body) if child.name == owners[depth]]
    return found


def _header(node: ast.AST) -> ast.AST:
    return ast.ClassDef(name=node.name, bases=node.bases, keywords=node.keywords, body=[],
                        decorator_list=node.decorator_list)


def find_nodes(path: str, qualname: str) -> list[ast.AST]:
    """Every definition of the class or function `qualname` in the file, and what is put in its place there.

    If/else branches and overloads count; so do assignments, imports and setattr of its name or of its class's, wherever
    they stand. `Class.__bases__` stands for the class's decorators, bases and keywords.
    """
    tree = _tree(path, os.path.getmtime(path))
    nodes: list[ast.AST] = [tree]
    owners, _, last = qualname.rpartition(".")
    for name in (owners if last == HEADER else qualname).split("."):
        nodes = [child for node in nodes for child in _definitions(node) if child.name == name]
    if last == HEADER:
        return [_header(node) for node in nodes if isinstance(node, ast.ClassDef)]
    return nodes + _rebindings(tree, qualname) if nodes else []


def of_targets(targets: tuple[str, ...], search: list[str] | None = None) -> tuple[str | None, str]:
    """Joint fingerprint of `module:qualname` targets.

    Returns (fingerprint, "") or (None, the first target that is missing). A target without a qualname stands for
    the module's existence only; one that ends in "?" may be missing, which counts, too.
    """
    digests = []
    for target in targets:
        optional = target.endswith("?")
        module, _, qualname = target.removesuffix("?").partition(":")
        loaded = sys.modules.get(module)
        path = getattr(loaded, "__file__", None) if search is None else None
        path = path if path and path.endswith(".py") else source_file(module, search)
        if path is None:
            return None, module
        if not qualname:
            continue
        try:
            nodes = find_nodes(path, qualname)
        except (SyntaxError, ValueError) as error:  # newer syntax than this Python's, or not text
            return None, f"{target} ({type(error).__name__} in {path})"
        if not nodes and not optional:
            return None, target
        digests += [] if nodes else ["absent"]
        digests += map(of_node, nodes)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:_HASH_LENGTH], ""
