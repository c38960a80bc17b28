"""Which keys of nested configuration dataclasses have an effect, from what their fields say of themselves.

A section with a field `enable` needs it for all of its other fields; the metadata `needs` of a field or section names
keys of which one must be on, that is, differ from its default; `nothing_at` is a value at which the field's section
decides nothing, and what it still does.
"""

from __future__ import annotations

import dataclasses
import functools


def value_of(config, key: str):
    """The value of a dotted key such as `prune.audit.window`."""
    return functools.reduce(getattr, key.split("."), config)


def leaves(cls, path: str = "", needs: tuple = ()):
    """(dotted key, field, conditions) of every leaf; each condition is a tuple of keys of which one must be on."""
    gated = path and any(spec.name == "enable" for spec in dataclasses.fields(cls))
    for spec in dataclasses.fields(cls):
        switch = ((f"{path}enable",),) if gated and spec.name != "enable" else ()
        own = (spec.metadata["needs"],) if spec.metadata.get("needs") else ()
        if spec.default_factory is dataclasses.MISSING:
            yield f"{path}{spec.name}", spec, (*needs, *switch, *own)
        else:
            yield from leaves(spec.default_factory, f"{path}{spec.name}.", (*needs, *switch, *own))


def spec_of(cls, key: str) -> dataclasses.Field:
    return next(spec for name, spec, _ in leaves(cls) if name == key)


def _unmet(config, default, needs: tuple) -> tuple | None:
    """The first of these conditions that is off."""
    return next((names for names in needs
                 if all(value_of(config, name) == value_of(default, name) for name in names)), None)


def deciding_nothing(config, default):
    """(key, value, what is left of it) of each leaf whose value makes what it belongs to decide nothing, though on."""
    for key, spec, needs in leaves(type(config)):
        nothing_at, left = spec.metadata.get("nothing_at") or (None, "")
        if nothing_at is not None and value_of(config, key) == nothing_at and not _unmet(config, default, needs):
            yield key, nothing_at, left


def without_effect(config, given, default):
    """(key, value, what it needs) of each leaf that differs from `given` and `default` while what it needs is off.

    `given` is what was not said key by key (a profile): nobody is blamed for that.
    """
    for key, _, needs in leaves(type(config)):
        value = value_of(config, key)
        if value in (value_of(given, key), value_of(default, key)):
            continue
        unmet = _unmet(config, default, needs)
        if unmet is not None:
            yield key, value, unmet
