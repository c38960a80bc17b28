"""Everything that `esgrpo lint` finds in one script: cuts, keys, contradictions, and what the overlay would say."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from esgrpo import recorded
from esgrpo.errors import EsgrpoError, say, show
from esgrpo.tools import language, upstreams
from esgrpo.tools.lint import rules
from esgrpo.tools.lint.expansion import UNKNOWN
from esgrpo.tools.lint.release import Release, commands, find, is_legacy, releases, short
from esgrpo.tools.lint.rules import ERROR, NOTE, PLACEHOLDER, WARNING, phrase, said
from esgrpo.tools.lint.script import Argument, Launch, Script

SIMILAR = 0.8  # difflib ratio from which a name counts as misspelt
SEGMENT = "actor_rollout_ref.rollout.segment"
MOVED = {"recipe.fully_async_policy.fully_async_main": "verl.experimental.fully_async_policy.fully_async_main",
         "recipe.one_step_off_policy.main_ppo": "verl.experimental.one_step_off_policy.main_ppo"}
BUILT = ("actor_rollout_ref.", "critic.")  # sections that verl turns into dataclasses
REF = "actor_rollout_ref.ref."
FREE = ("override", "kwargs")  # sections with such a name are handed on to other libraries
ENGINES = ("megatron", "veomni", "torchtitan")  # sections that the configs of model_engine=... have
IN_SCHEDULER = {"segment", "observe"}  # features that vLLM's scheduler has the hooks of
SHOWN = 3  # dropped arguments that are named
UNFILLED = re.compile(r"<[^<>=]+>")  # <path to the model>
CHANGED = re.compile(r"[\w.]+: .+? -> ")  # a line of the overlay's plan that tells a change
UNUSABLE = 2  # exit code


@dataclass(frozen=True)
class Finding:
    """`key` is the setting, or what else it is about."""

    line: int
    severity: str
    key: str
    problem: str
    todo: str

    def __str__(self) -> str:
        return f"{self.line}: {self.severity}: {self.key}: {self.problem} -> {self.todo}"


@dataclass(frozen=True)
class Result:
    """`checked` says against what and why, one line a launch; `complete` is False where some was not."""

    findings: list[Finding]
    checked: list[str]
    complete: bool = True


def lint(path: Path, verl: str | None = None, variables: dict[str, str] | None = None) -> Result:
    """Findings for `path`. Raises EsgrpoError when it holds no launch of verl."""
    try:
        script = Script(path, variables)
    except OSError as error:
        raise EsgrpoError("lint", f"{path}: {error.strerror}", "a shell script", "nothing was checked",
                          "correct the path") from None
    if not script.launches:
        raise EsgrpoError("lint", f"no launch of verl in {path}", "python -m verl....main... with Hydra arguments",
                          "nothing was checked", "give the script that starts the training; "
                          "set variables that it branches on: esgrpo lint SCRIPT NAME=VALUE")
    findings, checked, complete = [], [], True
    if script.crlf:
        findings.append(_finding(1, ERROR, "CRLF", "crlf", count=script.crlf, script=path.name))
    for launch in script.launches:
        try:
            release = find(verl, launch.module, path)
        except upstreams.Unavailable as error:
            wanted = str(error.args[0]).rpartition(" ")[2]
            found, config, why = _without_verl(launch, wanted, error), "", ""
        else:
            wanted, (found, config) = release.version, _launch(launch, release)
            why = said(release.why, file=release.asked_in, module=launch.module)[0]
        findings += found
        values = {"line": launch.line, "module": launch.module, "release": short(wanted), "why": why or "?"}
        checked.append(phrase("checked", config=config, **values) if config else phrase("unchecked", **values))
        complete = complete and bool(config)
    return Result(sorted(set(findings), key=lambda f: (f.line, f.severity, f.key)), checked, complete)


def _finding(line: int, severity: str, key: str, name: str, /, **values) -> Finding:
    """The finding that findings.toml calls `name`."""
    return Finding(line, severity, key, *said(name, **values))


def _without_verl(launch: Launch, version: str, error: EsgrpoError) -> list[Finding]:
    """What can be said from the script alone."""
    arguments = [a for a in [*launch.arguments, *launch.dropped] if "=" in a.text and a.text[:1] not in "-\0"]
    known = releases()
    name = "no_verl" if version in known or upstreams.COMMIT.fullmatch(version) else "no_release"
    return [*_cuts(launch), *_twice(arguments), _finding(
        launch.line, NOTE, launch.module, name, release=short(version), why=str(error.args[1]),
        commands=commands(version), known=", ".join(known))]


def _launch(launch: Launch, release: Release) -> tuple[list[Finding], str]:
    """Findings, and the name of the config that they were made with; empty where nothing was composed."""
    findings = _cuts(launch)
    main = release.main(launch.module)
    if main is None:
        return [*findings, _no_main(launch, release)], ""
    config_dir, name = main
    overrides: list[Argument] = []
    arguments = [*launch.arguments, *launch.dropped]
    options = {"--config-path": "", "--config-name": ""}
    waiting = ""
    for argument in arguments:
        option, equals, value = argument.text.partition("=")
        if waiting:
            options[waiting], waiting = argument.text, ""
        elif option in options:
            options[option], waiting = value, "" if equals else option
        elif "=" in argument.text and not argument.text.startswith(("-", "\0")) or argument.text[:1] == "~":
            overrides.append(argument)
    options["--config-path"] = _from_where_it_starts(options["--config-path"], release)
    if UNKNOWN.search(options["--config-path"] + options["--config-name"]):
        return [*findings, _finding(launch.line, NOTE, "--config-path", "config_from_environment")], ""
    if options["--config-path"]:
        config_dir = (release.file(launch.module).parent / options["--config-path"]).resolve()
        if Path(options["--config-path"]).is_absolute() and not config_dir.is_dir():
            return [*findings, _finding(launch.line, NOTE, "--config-path", "config_elsewhere", path=config_dir)], ""
    if options["--config-name"]:
        name = options["--config-name"].removesuffix(".yaml")
    findings += _from_environment(overrides)
    outside = next((a for a in overrides if a.text.lstrip("+").startswith("hydra.searchpath=")), None)
    if outside:
        return [*findings, *_twice(overrides), _finding(outside.line, NOTE, "hydra.searchpath", "searchpath")], ""
    composed, complete = _composed(launch, release, config_dir, name, overrides)
    return findings + composed, name if complete else ""


def _from_where_it_starts(path: str, release: Release) -> str:
    """`path` with $(pwd) replaced by where it exists: verl's scripts are started at the root of a checkout."""
    found = UNKNOWN.match(path)
    if found is None or found.group(1) not in ("$(pwd)", "PWD"):
        return path
    rest = path[found.end():].lstrip("/")
    return next((str(place / rest) for place in (release.root, *release.beside) if (place / rest).is_dir()), path)


def _no_main(launch: Launch, release: Release) -> Finding:
    """An error where verl should have this main; where it comes from elsewhere only that nothing was checked."""
    module, version = launch.module, release.shown
    if release.file(module) is not None:
        return _finding(launch.line, NOTE, module, "no_hydra_main")
    moved = MOVED.get(module, "") if not is_legacy(module) or release.main(MOVED.get(module, "")) else ""
    moved = moved or next((old for old, new in MOVED.items() if new == module), "")
    if module.startswith("recipe.") and not moved:
        return _finding(launch.line, NOTE, module, "recipe_missing", release=version,
                        commands=commands(release.version))
    if not module.startswith(("verl.", "recipe.")):
        return _finding(launch.line, NOTE, module, "own_main", release=version)
    near = moved if moved and release.main(moved) else ", ".join(
        difflib.get_close_matches(module, release.mains(), 2)) or "another main"
    return _finding(launch.line, ERROR, module, "no_main", release=version, near=near)


def _cuts(launch: Launch) -> list[Finding]:
    if not launch.dropped:
        return [Finding(line, WARNING, "line continuation", *said(why)) for line, why in launch.cuts]
    line, why = launch.cuts[0]
    names = [a.text.partition("=")[0] for a in launch.dropped]
    more = phrase("more", count=len(names) - SHOWN) if len(names) > SHOWN else ""
    return [_finding(line, ERROR, "line continuation", "cut", why=phrase(why), count=len(names),
                     first=launch.dropped[0].line, last=launch.dropped[-1].line, names=", ".join(names[:SHOWN]),
                     more=more)]


def _twice(overrides: list[Argument]) -> list[Finding]:
    seen: dict[str, Argument] = {}
    findings = []
    for argument in overrides:
        key, _, value = argument.text.partition("=")
        key = key.lstrip("+")
        if key in seen and seen[key].text.partition("=")[2] != value:
            findings.append(_finding(argument.line, WARNING, key, "twice", line=seen[key].line,
                                     value=UNKNOWN.sub(r"$\1", value)))
        seen[key] = argument
    return findings


def _from_environment(overrides: list[Argument]) -> list[Finding]:
    """One note for all values that are nothing but a variable which the script does not set."""
    missing: dict[str, int] = {}
    for argument in overrides:
        found = UNKNOWN.fullmatch(argument.text.partition("=")[2])
        if found and found.group(1).isidentifier():
            missing.setdefault(found.group(1), argument.line)
    return [_finding(min(missing.values()), NOTE, ", ".join(missing), "environment")] if missing else []


def _text(argument: Argument) -> str:
    return UNKNOWN.sub(PLACEHOLDER, argument.text)


def _composed(launch: Launch, release: Release, config_dir: Path, name: str,
              overrides: list[Argument]) -> tuple[list[Finding], bool]:
    """Findings, and whether a configuration was composed at all."""
    texts = [_text(argument) for argument in overrides]
    commented = [argument for argument in launch.commented if "=" in argument.text]
    segment = any(SEGMENT in text or "loss_mode=pois" in text or "loss_mode=sais" in text for text in texts)
    answer = release.compose(config_dir, name, texts, segment)
    if answer is not None and "broken" in answer:
        return [*_twice(overrides), _finding(launch.line, ERROR, name, "broken", release=release.shown,
                                             error=answer["broken"])], True
    if answer is None:
        return [*_twice(overrides), *_without_hydra(release, launch.module, overrides, commented)], False
    findings = []
    lines: dict[str, int] = {}
    added: dict[str, int] = {}
    own = _is_own(launch.module)
    for argument, result in zip(overrides, answer["results"], strict=True):
        lines[result.get("key", argument.text)] = argument.line
        findings += _key(argument, result, answer["keys"], release, launch.module, added)
        if result.get("missing") and "error" not in result:
            added[result["key"]] = argument.line
    if commented:
        notes = release.compose(config_dir, name, [_text(argument) for argument in commented], False)
        for argument, result in zip(commented, notes["results"], strict=True):
            findings += [_finding(f.line, NOTE, f.key, "commented", problem=f.problem, todo=f.todo)
                         for f in _key(argument, result, answer["keys"], release, launch.module)]
    device = answer["config"].get("trainer", {}).get("device") if isinstance(answer["config"], dict) else ""
    config = rules.Config(answer["config"], frozenset(lines), launch.module, release.version, str(device),
                          release.flash_default, release.validates(launch.module),
                          frozenset(slug for slug in rules.PATCHES if release.has_patch(slug)))
    stopped = {(f.line, f.key) for f in findings if f.severity == ERROR}
    findings += [f for f in _twice(overrides) if (f.line, f.key) not in stopped]
    findings += [Finding(_line(lines, key, launch), WARNING if own and severity == ERROR else severity, key, problem,
                         todo) for severity, key, problem, todo in rules.check(config)]
    return findings + _overlay(answer["overlay"], release, lines, launch), True


def _line(lines: dict[str, int], key: str, launch: Launch) -> int:
    """The line that sets `key` or something below it, else that of the launch."""
    return lines.get(key) or next((n for k, n in lines.items() if k.startswith(f"{key}.")), launch.line)


def _is_own(module: str) -> bool:
    """A main that is not verl's: its workers may read what verl's dataclasses have no field for."""
    return not module.startswith("verl.") and not is_legacy(module)


def _key(argument: Argument, result: dict, keys: list[str], release: Release, module: str,
         added: dict[str, int] | None = None) -> list[Finding]:
    """What Hydra, verl's dataclasses and verl's source say of one override. `added`: what the script added above."""
    own = _is_own(module)
    plain, _, value = argument.text.partition("=")
    key, line, version = result.get("key", plain.lstrip("+~")), argument.line, release.shown
    if "error" in result:
        if result.get("kind") == "key" and result.get("missing"):
            ours = key == SEGMENT or key.startswith(f"{SEGMENT}.")
            suggestion = said("add", override=argument.text)[1] if ours else _suggestion(key, result, keys)
            return [_finding(line, ERROR, key, "unknown_key", release=version, missing=result["missing"],
                             below=_below(result), suggestion=suggestion)]
        if result.get("kind") == "key" and plain.startswith("+") and "Could not append" in result["error"]:
            before = [place for name, place in (added or {}).items() if f"{name}.".startswith(f"{key}.")]
            if before:
                return [_finding(line, ERROR, key, "added_twice", line=before[-1])]
            return [_finding(line, ERROR, key, "exists", release=version, key=key)]
        if UNFILLED.search(value):
            return [_finding(line, ERROR, key, "placeholder", value=UNFILLED.search(value).group())]
        return [_finding(line, ERROR, key, "grammar", error=result["error"].rstrip("."))]
    missing = result.get("missing")
    if not missing or not plain.startswith("+") or key == SEGMENT or key.startswith(f"{SEGMENT}."):
        return []
    close = difflib.get_close_matches(missing, result["beside"], 1, cutoff=SIMILAR)
    kind = result["target"].rpartition(".")[2]
    built = key.startswith(BUILT) and not (key.startswith(REF) and release.reads_ref_freely)
    fields = release.fields.get(kind) if built else None
    if fields and missing not in fields and missing not in result["beside"]:
        return [_finding(line, WARNING if own else ERROR, key, "no_field_in_a_recipe" if own else "no_field", kind=kind,
                         missing=missing, suggestion=_suggestion(key, result, keys))]
    passed_on = any(word in f"{result['at']}.{missing}" for word in FREE)
    if missing not in release.names(module) and not passed_on:
        severity = ERROR if close and not own else WARNING
        return [_finding(line, severity, key, "nobody_reads", release=version, missing=missing, below=_below(result),
                         suggestion=_suggestion(key, result, keys))]
    return []


def _below(result: dict) -> str:
    return phrase("below", at=result["at"]) if result.get("at") else phrase("top")


def _suggestion(key: str, result: dict, keys: list[str]) -> str:
    """The nearest key of the release: a misspelt part, the same name elsewhere, or the nearest whole key."""
    missing, at = result.get("missing", ""), result.get("at", "")
    if missing in ENGINES:
        return said("other_engine", engine=missing)[1]
    rest = key[len(at):].lstrip(".").partition(".")[2]
    close = difflib.get_close_matches(missing, result.get("beside", []), 1, cutoff=SIMILAR)
    if close:
        return said("did_you_mean", name=".".join(part for part in (at, close[0], rest) if part))[1]
    leaf = key.rpartition(".")[2]
    same = [other for other in keys if other.rpartition(".")[2] == leaf or other.endswith(f".{key}")]
    near = difflib.get_close_matches(key, same, 1, cutoff=0.5) or difflib.get_close_matches(
        key, keys, 1, cutoff=SIMILAR)
    return said("did_you_mean", name=near[0])[1] if near else said("remove")[1]


def _without_hydra(release: Release, module: str, overrides: list[Argument],
                   commented: list[Argument]) -> list[Finding]:
    """Names only: a part of a key that no YAML file of the release has. Values and places are not checked."""
    findings = [_finding(0, NOTE, "hydra", "no_hydra", release=release.shown)]
    known, names = release.config_names, release.names(module)
    for argument in overrides + commented:
        plain, note = argument.text.partition("=")[0], argument in commented
        if UNKNOWN.search(plain) or "@" in plain or plain.lstrip("+").startswith(SEGMENT):
            continue
        for part in plain.lstrip("+~").split("."):
            close = difflib.get_close_matches(part, known, 1, cutoff=SIMILAR)
            if part not in known and part not in names and (close or not plain.startswith("+")):
                suggestion = said("did_you_mean", name=close[0]) if close else said("remove")
                found = _finding(argument.line, ERROR, plain.lstrip("+~"), "no_such_name", release=release.shown,
                                 missing=part, suggestion=suggestion[1])
                findings.append(found if not note else _finding(
                    found.line, NOTE, found.key, "commented", problem=found.problem, todo=found.todo))
                break
    return findings


def _overlay(answers: list[dict], release: Release, lines: dict[str, int], launch: Launch) -> list[Finding]:
    """What the overlay needs: its launcher, a release with places for its hooks, and settings of verl."""
    if not answers:
        return []
    line = _line(lines, SEGMENT, launch)
    if not recorded.is_supported("verl", release.version):
        return [_finding(line, ERROR, SEGMENT, "overlay_release", release=release.shown,
                         places=", ".join(recorded.of_upstream("verl").supported))]
    findings = [] if launch.with_overlay else [_finding(line, NOTE, SEGMENT, "overlay_run")]
    for entry in answers:
        if "features" in entry:
            findings += [_finding(line, WARNING, SEGMENT, "overlay_feature", feature=feature, release=release.shown,
                                  why=why) for feature, why in _without_place(entry["features"], release.version)]
        elif "refusal" in entry:
            who, found, wanted, consequence, todo = entry["refusal"]
            findings.append(_finding(_line(lines, who, launch), ERROR, who, "overlay_refuses", found=found,
                                     wanted=wanted, consequence=consequence, todo=todo))
        elif "idle" in entry:
            key, _, why = entry["idle"].partition("=")
            findings.append(_finding(_line(lines, key, launch), WARNING, key, "overlay_idle", why=why))
        elif "line" in entry:
            key, _, change = entry["line"].partition(": ")
            name = "overlay_changes" if CHANGED.match(entry["line"]) else "overlay_says"
            findings.append(_finding(_line(lines, key, launch), NOTE, key, name, change=change))
        elif "unchecked" in entry:
            findings.append(_finding(line, NOTE, SEGMENT, "overlay_unchecked", error=entry["unchecked"]))
    return findings


def _without_place(features: list[str], version: str) -> list[tuple[str, str]]:
    """Features that have hooks in some verl and none in this one, with the hooks' own reasons."""
    from esgrpo import engine

    hooks = [record.hook for record in engine.load_hooks().values()]
    found = []
    for feature in sorted(set(features) - IN_SCHEDULER):
        ours = [hook for hook in hooks if hook.upstream == "verl" and feature in hook.features]
        reasons = {engine.has_no_place(hook, version) for hook in ours}
        if ours and "" not in reasons:
            found.append((feature, "; ".join(sorted(reasons))))
    return found


def main(arguments) -> int:
    """Exit code 1 with an error in the script, 2 where a launch could not be checked, else 0."""
    variables, wrong = {}, []
    for text in arguments.variable:
        name, equals, value = text.partition("=")
        variables[name] = value
        wrong += [] if equals and name.isidentifier() else [text]
    if wrong:
        raise EsgrpoError("lint", wrong[0], "NAME=VALUE after the script", "nothing was checked", "correct it")
    result = lint(Path(arguments.script), arguments.verl, variables)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in result.findings], indent=2))
    else:
        for finding in result.findings:
            show(f"{arguments.script}:{finding}")
    for line in result.checked:
        say(line)
    counts = Counter(finding.severity for finding in result.findings)
    counted = language.counted if language.spoken() == "en" else lambda number, _: number
    say(phrase("counts", **{f"{severity}s": counted(counts[severity], severity)
                            for severity in (ERROR, WARNING, NOTE)}))
    return 1 if counts[ERROR] else 0 if result.complete else UNUSABLE
