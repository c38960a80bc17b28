"""Recorded fingerprints: hooks/fingerprints/UPSTREAM.toml, written by `python -m ci.record_hooks`.

    supported = ["==0.7.0", ">=0.9,<0.10"]      # releases that the overlay is made for
    [a-slug]
    77425434654c085c = ["0.9.0", "0.9.1"]       # joint fingerprint of the hook's targets: releases that have it
    cured.41bf181c83ee74a9 = ["0.9.1+a-slug"]   # of the target alone, where the hook has nothing left to do

A patched checkout is named version+slug, several slugs joined by dots, all of the series version+series. A file is read
when the first hook of its upstream is resolved, never at the start of an interpreter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from esgrpo.errors import HookError

DIRECTORY = Path(__file__).with_name("hooks") / "fingerprints"
CURED, SUPPORTED = "cured", "supported"


@dataclass(frozen=True)
class Recorded:
    """Sources of one hook that were tested, and sources that need the hook no more: release -> fingerprint."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    cured: dict[str, str] = field(default_factory=dict)


NOTHING = Recorded()


@dataclass(frozen=True)
class Upstream:
    """One file: PEP 508 specifiers of the supported releases, and what is recorded of each hook."""

    supported: tuple[str, ...]
    hooks: dict[str, Recorded]


def path_of(upstream: str) -> Path:
    return DIRECTORY / f"{upstream}.toml"


@functools.cache
def of_upstream(upstream: str) -> Upstream:
    """Raises HookError when there is no file: without fingerprints nothing may act."""
    from esgrpo.compat import toml

    path = path_of(upstream)
    try:
        content = toml(path)
    except (OSError, ValueError) as error:
        raise HookError(path.name, f"{type(error).__name__}", f"the recorded fingerprints of {upstream}",
                        "no hook of it acts", "install the overlay again") from error
    return Upstream(tuple(content.pop(SUPPORTED, ())), {slug: _hook(entry) for slug, entry in content.items()})


def of_hook(hook) -> Recorded:
    """What is recorded of an engine.Hook; nothing of one that no source guards."""
    return NOTHING if hook.unguarded else of_upstream(hook.upstream).hooks.get(hook.slug, NOTHING)


def is_supported(upstream: str, version: str) -> bool:
    """Is this release one that the overlay is made for? What it may do there, the fingerprints decide."""
    from packaging.specifiers import SpecifierSet

    return any(SpecifierSet(spec).contains(version, prereleases=True) for spec in of_upstream(upstream).supported)


def _hook(entry: dict) -> Recorded:
    return Recorded(_by_release({name: value for name, value in entry.items() if name != CURED}),
                    _by_release(entry.get(CURED, {})))


def _by_release(entry: dict[str, list[str]]) -> dict[str, str]:
    """release -> fingerprint, oldest release first, a patched tree after its release."""
    found = {release: fingerprint for fingerprint, releases in entry.items() for release in releases}
    return {release: found[release] for release in sorted(found, key=order_of)}


def order_of(release: str) -> tuple:
    """Sort key of a release, patched or not."""
    from packaging.version import Version

    version, _, patches = release.partition("+")
    return Version(version), patches
