"""Which release of an upstream is installed here, and what a table by release says of it."""

from __future__ import annotations

import os
import sys
from importlib import metadata

from esgrpo import fingerprint

_installed: dict[tuple[str, ...], str] = {}  # (upstream, where it was looked for) -> release


def installed(upstream: str) -> str | None:
    """Release from dist metadata or from a source checkout's version file; None when not installed.

    Every hook asks. What was found holds as long as sys.path does; what was not is looked for again.
    """
    key = (upstream, *sys.path)
    if key not in _installed:
        version = _read(upstream)
        if version is None:
            return None
        _installed[key] = version
    return _installed[key]


def _read(upstream: str) -> str | None:
    for name in (upstream, f"{upstream}-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version:  # None where a half-deleted installation left metadata without one
            return version.partition("+")[0]
    init = fingerprint.source_file(upstream)
    if init is None:
        return None
    version_file = os.path.join(os.path.dirname(init), "version", "version")
    if os.path.exists(version_file):
        with open(version_file, encoding="utf-8") as file:
            return file.read().strip()
    return "unknown"


def public(version: str) -> str:
    """Without dev, pre and local parts: a checkout of the tag v0.7.0 calls itself 0.7.0.dev0."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def values_of(table: tuple, version: str) -> list:
    """What a table of (specifier, value) says of this release."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return [value for specifier, value in table if SpecifierSet(specifier).contains(public(version))]
    except InvalidVersion:  # a checkout that does not know its version: the fingerprint decides alone
        return []
