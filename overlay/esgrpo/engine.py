"""Hook engine: which hooks exist, in which state each is in this process, and why.

A hook file declares a `HOOK` and `around(call)` (kinds wrap and replace; see esgrpo.call), or where that cannot be
`build(original) -> replacement`, or `apply(module)` with `installed(module) -> bool` (kind add). Importing a hook file
has no side effects. The engine decides whether a hook may act: its fingerprint must be one that was tested
(esgrpo.recorded), the version only chooses which one to expect. After applying, it reads back and says what it found;
it never reports success unconditionally.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from esgrpo import __version__, fingerprint, recorded, releases
from esgrpo.algo.terms import Feature, Process
from esgrpo.call import wrapped
from esgrpo.errors import HookError, plain, say

MARKER = "__esgrpo__"
UPSTREAM_OF = {"recipe": "verl"}  # the recipes of verl <= 0.7.0 are a package beside verl in its repository
PLATFORMS = {"cpu": Feature.CPU, "huawei": Feature.NPU}  # VERL_PLATFORM, in the words of verl -> feature


class State(str, enum.Enum):
    PENDING = "PENDING"  # the target module has not been imported yet
    APPLIED = "APPLIED"
    NOT_NEEDED = "NOT_NEEDED"  # the feature is off, or this kind of process never uses it
    DISABLED = "DISABLED"  # named in ESGRPO_DISABLE
    ABSENT = "ABSENT"  # the upstream is not installed
    INCOMPATIBLE = "INCOMPATIBLE"  # untested release, untested source
    DRIFTED = "DRIFTED"  # tested release, but its source is not the tested one
    LATE = "LATE"  # the target was imported before the overlay
    FAILED = "FAILED"  # applying or reading back failed


FINE = frozenset({State.APPLIED, State.NOT_NEEDED, State.ABSENT})
ACCEPTED = FINE | {State.DISABLED}  # what the user switched off by name does not stop a run, but is always shown


@dataclass(frozen=True)
class Hook:
    """Declaration of one behaviour. `target` and `relies_on` are "module:qualname"; all are fingerprinted.

    In `relies_on`, "module:Class.__bases__" is a class without its body, and what ends in "?" may be absent. Which
    fingerprints of them are tested stands in hooks/fingerprints/, written by `python -m ci.record_hooks`.
    """

    slug: str
    target: str
    process: tuple[str, ...]
    kind: str  # wrap | replace | add
    why: str
    remove_when: str
    features: tuple[str, ...] = ()  # needed when one of these is on; empty: always
    relies_on: tuple[str, ...] = ()
    rebinds: tuple[str, ...] = ()  # "module:name" aliases that `from x import f` made before we came
    after: tuple[str, ...] = ()  # slugs of hooks on the same target that this one wraps
    without: tuple[tuple[str, str], ...] = ()  # (specifier, reason): releases in which this hook has no place
    patches: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (specifier, slugs): git patches that it presumes there
    unguarded: str = ""  # why no fingerprint guards the target
    calls: str = ""  # of a wrap: how often it calls the original, and why; empty: once, and the engine sees to it

    def __post_init__(self):
        """Raises HookError for a word that nothing will ever match: the hook would silently never be needed."""
        for field_, words in (("process", Process), ("features", Feature)):
            known = {str(word) for word in words}
            unknown = [word for word in getattr(self, field_) if word not in known]
            if unknown:
                raise HookError(self.slug, f"{field_} {', '.join(map(repr, unknown))}",
                                f"words of esgrpo.algo.terms.{words.__name__}", "nothing is loaded",
                                "correct the declaration, or add the word there")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def upstream(self) -> str:
        root = self.module.partition(".")[0]
        return "python" if root in sys.stdlib_module_names else UPSTREAM_OF.get(root, root)


@dataclass
class Record:
    hook: Hook
    code: object  # the hook file's module
    state: State = State.PENDING
    detail: str = "target not imported"
    found: str = ""
    revert: list = field(default_factory=list)  # undo actions, last first
    modules: list = field(default_factory=list)  # copies of the target module that have the hook


_records: dict[str, Record] = {}
_booted = False
_cannot_act: Callable[[Record], None] | None = None


def enabled() -> bool:
    return os.environ.get("ESGRPO_ENABLE") == "1"


def strict() -> bool:
    return os.environ.get("ESGRPO_STRICT", "1") != "0"


def disabled_slugs() -> frozenset[str]:
    return frozenset(s.strip() for s in os.environ.get("ESGRPO_DISABLE", "").split(",") if s.strip())


def active_features() -> frozenset[str]:
    """Features of this run. The driver derives them from the config and hands them on in ESGRPO_FEATURES.

    A platform that the user names in VERL_PLATFORM is one too, where hooks depend on it.
    """
    features = {f for f in os.environ.get("ESGRPO_FEATURES", "").split(",") if f}
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if platform in PLATFORMS:
        features.add(PLATFORMS[platform])
    return frozenset(features)


def load_hooks() -> dict[str, Record]:
    """Import every hook file (no upstream is imported) and return the registry."""
    if not _records:
        from esgrpo import hooks

        found: dict[str, Record] = {}
        for name in hooks.files():
            code = importlib.import_module(f"esgrpo.hooks.{name}")
            if code.HOOK.slug in found:
                raise HookError(code.HOOK.slug, "declared twice", "one hook a slug", "nothing is loaded", "rename one")
            found[code.HOOK.slug] = Record(code.HOOK, code)
        for record in found.values():
            _place(record.hook.slug, found)
    return _records


def _place(slug: str, found: dict[str, Record], outer: tuple[str, ...] = ()) -> None:
    """Into the registry, behind the hooks that it wraps. Raises HookError where one is unknown or wraps itself."""
    if slug in _records:
        return
    if slug not in found or slug in outer:
        raise HookError(outer[-1], f"after {slug}", "the slug of another hook, which is not after this one",
                        "nothing is loaded", "correct the declaration")
    for inner in found[slug].hook.after:
        _place(inner, found, (*outer, slug))
    _records[slug] = found[slug]


def boot(cannot_act: Callable[[Record], None] | None = None) -> None:
    """Register the import hooks of this process; idempotent.

    `cannot_act` is told of each hook that must not act although its target is loaded.
    """
    global _booted, _cannot_act
    if _booted:
        return
    _booted, _cannot_act = True, cannot_act
    import wrapt

    for record in load_hooks().values():
        already = record.hook.module in sys.modules and record.hook.upstream != "python"
        if already:
            record.state, record.detail = State.LATE, "the target was imported before the overlay"
            continue
        wrapt.register_post_import_hook(lambda _module, r=record: _activate(r), record.hook.module)


def refresh() -> None:
    """Look again at hooks whose target is loaded: called when the features become known, and by v1 mains."""
    for record in load_hooks().values():
        _activate(record)


def _copies_of(name: str) -> list:
    """Loaded copies of a module: under its name, and as __main__ when it runs as `python -m name`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    alias = main if spec is not None and spec.name == name else None
    return [module for module in (sys.modules.get(name), alias) if module is not None]


def has_no_place(hook: Hook, version: str) -> str:
    """Why the hook has nothing to do in this release; empty when it has."""
    return next(iter(releases.values_of(hook.without, version)), "")


def presumed_patches(hook: Hook, version: str) -> list[str]:
    """Slugs of the git patches without which the hook's source is not in this release."""
    return [slug for slugs in releases.values_of(hook.patches, version) for slug in slugs]


def check(hook: Hook, search: list[str] | None = None,
          features: frozenset[str] | None = None) -> tuple[State, str, str]:
    """May this hook act here? Returns (state, detail, found fingerprint); PENDING means yes.

    `features`: those of another run than this process's.
    """
    slugs = disabled_slugs()
    if hook.slug in slugs or "*" in slugs:
        return State.DISABLED, "ESGRPO_DISABLE", ""
    if hook.features and not (active_features() if features is None else features).intersection(hook.features):
        return State.NOT_NEEDED, f"feature {'|'.join(hook.features)} is off", ""
    upstream = hook.upstream
    version = "" if upstream == "python" else releases.installed(upstream)
    if version is None:
        return State.ABSENT, f"{upstream} is not installed", ""
    if hook.unguarded:
        return State.PENDING, "", ""
    reason = has_no_place(hook, version)
    if reason:
        return State.NOT_NEEDED, f"{upstream} {version}: {reason}", ""
    cure, found = cured_by(hook, search)
    if cure:
        return State.NOT_NEEDED, f"cured by {cure}", found
    found, missing = fingerprint.of_targets((hook.target, *hook.relies_on), search)
    known = recorded.of_hook(hook).fingerprints
    if found is not None and found in known.values():
        return State.PENDING, f"{upstream} {version}", found
    what = f"{missing} is missing" if found is None else f"fingerprint {found}"
    needed = presumed_patches(hook, version)
    hint = f"; it presumes the git patches {', '.join(needed)}: see ./apply.sh" if needed else ""
    if version in known:
        return State.DRIFTED, f"{upstream} {version}: {what}, expected {known[version]}{hint}", found or ""
    tested = ", ".join(v for v in known if "+" not in v)
    return State.INCOMPATIBLE, f"{upstream} {version}: {what}, tested {tested or 'nowhere'}{hint}", found or ""


def cured_by(hook: Hook, search: list[str] | None = None) -> tuple[str, str]:
    """(who did the hook's work in the source, fingerprint), or empty strings: never the hook on top of its patch."""
    cured = {f: source for source, f in recorded.of_hook(hook).cured.items()}
    if not cured:
        return "", ""
    found = fingerprint.of_targets((hook.target,), search)[0]
    if found not in cured:
        return "", ""
    version, _, patches = cured[found].partition("+")
    patched = {hook.slug, "series"}.intersection(patches.split("."))
    return f"the git patch {hook.slug}" if patched else f"{hook.upstream} {version} itself", found


def _activate(record: Record) -> None:
    """Apply one hook where its target is loaded. Never raises: an import of upstream must not fail silently.

    Only the guard may end a driver here, in one line.
    """
    copies = [module for module in _copies_of(record.hook.module) if module not in record.modules]
    if not copies or record.state not in (State.PENDING, State.NOT_NEEDED, State.APPLIED):
        return
    try:
        record.state, record.detail, record.found = check(record.hook)
        if record.state is State.PENDING:
            for module in copies:
                _apply(record, module)
    except Exception as error:
        record.state, record.detail = State.FAILED, f"{type(error).__name__}: {error}"
    if record.state not in FINE:
        say(boot_line([record]))
        if _cannot_act is not None:
            _cannot_act(record)


def _apply(record: Record, module) -> None:
    hook, code = record.hook, record.code
    if hook.kind == "add":
        code.apply(module)
        good = code.installed(module)
    else:
        owner, name, found = resolve(module, hook.target.partition(":")[2])
        method = type(found) if isinstance(found, (staticmethod, classmethod)) else None
        original = found.__func__ if method else found
        replacement = wrapped(code, original)
        setattr(replacement, MARKER, hook.slug)
        own = name in vars(owner)
        setattr(owner, name, method(replacement) if method else replacement)
        record.revert.append(lambda: setattr(owner, name, found) if own else delattr(owner, name))
        for alias in hook.rebinds:
            _rebind(alias, original, replacement, record)
        good = carries(inspect.getattr_static(owner, name), hook.slug)
    if not good:
        raise HookError(hook.slug, "read-back found the original", "our replacement", "not applied", "report this")
    record.modules.append(module)
    record.state = State.APPLIED


def _rebind(alias: str, original, replacement, record: Record) -> None:
    module = sys.modules.get(alias.partition(":")[0])
    name = alias.partition(":")[2]
    if module is not None and getattr(module, name, None) is original:
        setattr(module, name, replacement)
        record.revert.append(lambda: setattr(module, name, original))


def revert(slug: str) -> None:
    """Undo a wrap or replace in this process (tests; a run never reverts)."""
    record = load_hooks()[slug]
    if record.hook.kind == "add":
        raise HookError(slug, "kind add", "wrap or replace", "nothing was undone", "start a new process")
    while record.revert:
        record.revert.pop()()
    record.modules.clear()
    record.state, record.detail = State.PENDING, "reverted"


def resolve(module, qualname: str):
    """(owner, name, attribute as stored) of a target. An ActorClass is no class: Ray ships its modified_class."""
    owner = module
    *path, name = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
        ray_metadata = getattr(owner, "__ray_metadata__", None)
        owner = owner if ray_metadata is None else ray_metadata.modified_class
    return owner, name, inspect.getattr_static(owner, name)


def carries(function, slug: str) -> bool:
    """True when `function`, or something it wraps, is the replacement of hook `slug`."""
    function = getattr(function, "__func__", function)
    while function is not None:
        if getattr(function, MARKER, None) == slug:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def states(process: str, instance=None) -> list[dict]:
    """The states of all hooks as seen by a process of the given kind.

    `instance` is the actor in this process: classes that Ray ships by value carry their hooks in their methods,
    while the module that the hook names may never be imported here.
    """
    rows = []
    for record in load_hooks().values():
        hook, state, detail = record.hook, record.state, record.detail
        if state in (State.PENDING, State.NOT_NEEDED) and hook.kind != "add" and instance is not None:
            *owners, name = hook.target.partition(":")[2].split(".")
            method = inspect.getattr_static(type(instance), name, None)
            if owners and carries(method, hook.slug):
                state, detail = State.APPLIED, "arrived with the actor class"
        if state is State.PENDING:
            state, detail, _ = check(hook)
            detail = detail if state is not State.PENDING else f"{hook.module} is not imported here"
        if state is State.PENDING and process not in hook.process:
            state, detail = State.NOT_NEEDED, f"not used in a {process}"
        rows.append({"slug": hook.slug, "state": state.value, "detail": detail, "target": hook.target,
                     "upstream": hook.upstream, "version": releases.installed(hook.upstream) or "",
                     "found": record.found, "needed": process in hook.process})
    return rows


def report(process: str, instance=None) -> dict:
    """What a process tells the driver about itself."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process": process, "overlay": os.path.dirname(__file__),
            "overlay_version": __version__, "segment": os.environ.get("ESGRPO_SEGMENT", ""),
            "strict": strict(), "disabled": sorted(disabled_slugs()), "features": sorted(active_features()),
            "hooks": states(process, instance)}


def not_in_place(rows: list[dict]) -> list[dict]:
    """Rows of hooks that this process needs and does not have."""
    return [row for row in rows if row["needed"] and State(row["state"]) not in ACCEPTED]


def lost_elsewhere(rows: list[dict], processes: frozenset[str]) -> list[dict]:
    """Rows of this process's `states` that some process of these kinds needs and that no source here can give it."""
    return [row for row in rows if not processes.isdisjoint(load_hooks()[row["slug"]].hook.process)
            and State(row["state"]) not in ACCEPTED]


def out_of_action(*slugs: str) -> str | None:
    """ "slug STATE" of the first of these hooks that was switched off or lost in this process, else None."""
    for slug in slugs:
        state = load_hooks()[slug].state
        if state not in FINE | {State.PENDING}:
            return f"{slug} {state.value}"
    return None


def boot_line(records: list[Record] | None = None) -> str:
    """One line per process with all that is not trivially fine."""
    records = list(load_hooks().values()) if records is None else records
    odd = [f"{r.hook.slug} {r.state.value} ({r.detail})" for r in records if r.state not in FINE | {State.PENDING}]
    flags = "".join([" ESGRPO_STRICT=0" if not strict() else "",
                     f" ESGRPO_DISABLE={','.join(sorted(disabled_slugs()))}" if disabled_slugs() else ""])
    applied, pending = (sum(r.state is state for r in records) for state in (State.APPLIED, State.PENDING))
    return plain(f"esgrpo[{os.getpid()}]: {applied} applied, {pending} wait for their target; "
                 + ("; ".join(odd) or "nothing odd") + flags)
