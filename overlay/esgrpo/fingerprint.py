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
    with open(path, encoding="utf-8") as file:
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


def find_nodes(path: str, qualname: str) -> list[ast.AST]:
    """Every definition of the class or function `qualname` in the file: if/else branches and overloads count too."""
    nodes: list[ast.AST] = [_tree(path, os.path.getmtime(path))]
    for name in qualname.split("."):
        nodes = [child for node in nodes for child in _definitions(node) if child.name == name]
    return nodes


def of_targets(targets: tuple[str, ...], search: list[str] | None = None) -> tuple[str | None, str]:
    """Joint fingerprint of `module:qualname` targets.

    Returns (fingerprint, "") or (None, the first target that is missing). A target without a qualname stands for
    the module's existence only.
    """
    digests = []
    for target in targets:
        module, _, qualname = target.partition(":")
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
        if not nodes:
            return None, target
        digests += map(of_node, nodes)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:_HASH_LENGTH], ""
