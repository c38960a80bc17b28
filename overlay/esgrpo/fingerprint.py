"""Fingerprints of upstream source: a hash of the normalised AST, computed without importing upstream.

The same text gives the same fingerprint under Python 3.10 to 3.13: positions, docstrings, comments, empty and
absent fields are left out, so that a reformatted or re-commented target counts as unchanged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
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
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = _without_docstring(value)
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


def source_file(module: str, search: list[str] | None = None) -> str | None:
    """Path of a module's source, found through sys.path (or `search`) without importing it or its parents."""
    locations = search
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = parts[depth]
        spec = importlib.machinery.PathFinder.find_spec(name, locations)
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or [])
        if depth < len(parts) - 1 and not locations:
            return None
    return spec.origin if spec and spec.origin and spec.origin.endswith(".py") else None


def find_node(path: str, qualname: str) -> ast.AST | None:
    """The class, function or module-level assignment `qualname` in the file, or None."""
    node: ast.AST = _tree(path, os.path.getmtime(path))
    for name in qualname.split("."):
        found = None
        for child in ast.walk(node) if isinstance(node, ast.Module) else node.body:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
                found = child
                break
        if found is None:
            return None
        node = found
    return node


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
        node = find_node(path, qualname)
        if node is None:
            return None, target
        digests.append(of_node(node))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:_HASH_LENGTH], ""
