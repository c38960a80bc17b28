"""Everything that `esgrpo lint` finds in one script: cuts, keys, contradictions, and what the overlay would say."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from esgrpo import recorded
from esgrpo.errors import EsgrpoError, say, show
from esgrpo.tools.lint import rules
from esgrpo.tools.lint.expansion import UNKNOWN
from esgrpo.tools.lint.release import Release, find, is_legacy
from esgrpo.tools.lint.rules import ERROR, NOTE, PLACEHOLDER, WARNING
from esgrpo.tools.lint.script import Argument, Launch, Script

SIMILAR = 0.8  # difflib ratio from which a name counts as misspelt
SEGMENT = "actor_rollout_ref.rollout.segment"
MOVED = {"recipe.fully_async_policy.fully_async_main": "verl.experimental.fully_async_policy.fully_async_main",
         "recipe.one_step_off_policy.main_ppo": "verl.experimental.one_step_off_policy.main_ppo"}
BUILT = ("actor_rollout_ref.", "critic.")  # sections that verl turns into dataclasses
FREE = ("override", "kwargs")  # sections with such a name are handed on to other libraries
IN_SCHEDULER = {"segment", "observe"}  # features that vLLM's scheduler has the hooks of
SHOWN = 3  # dropped arguments that are named


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
    """`checked` says against what, one line a launch."""

    findings: list[Finding]
    checked: list[str]


def lint(path: Path, verl: str | None = None, variables: dict[str, str] | None = None) -> Result:
    """Findings for `path`. Raises EsgrpoError when it holds no launch of verl or the release cannot be had."""
    try:
        script = Script(path, variables)
    except OSError as error:
        raise EsgrpoError("lint", f"{path}: {error.strerror}", "a shell script", "nothing was checked",
                          "correct the path") from None
    if not script.launches:
        raise EsgrpoError("lint", f"no launch of verl in {path}", "python -m verl....main... with Hydra arguments",
                          "nothing was checked", "give the script that starts the training; "
                          "set variables that it branches on: esgrpo lint SCRIPT NAME=VALUE")
    findings, checked = [], []
    for launch in script.launches:
        release = find(verl, launch.module)
        found, what = _launch(launch, release)
        findings += found
        checked.append(what)
    return Result(sorted(set(findings), key=lambda f: (f.line, f.severity, f.key)), checked)


def _launch(launch: Launch, release: Release) -> tuple[list[Finding], str]:
    findings = _cuts(launch)
    head = f"line {launch.line}: {launch.module}, verl {release.version}"
    main = release.main(launch.module)
    if main is None:
        near = MOVED.get(launch.module) if not is_legacy(launch.module) or release.main(
            MOVED.get(launch.module, "")) else None
        near = near or next((old for old, new in MOVED.items() if new == launch.module), None)
        near = near if near and release.main(near) else ", ".join(
            difflib.get_close_matches(launch.module, release.mains(), 2)) or "another main"
        findings.append(Finding(launch.line, ERROR, launch.module, f"verl {release.version} has no such main",
                                f"use {near}, or check against another release with --verl"))
        return findings, f"{head}: not composed"
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
    if UNKNOWN.search(options["--config-path"] + options["--config-name"]):
        findings.append(Finding(launch.line, NOTE, "--config-path", "depends on the environment, so nothing was "
                                "composed", "check with esgrpo lint SCRIPT NAME=VALUE"))
        return findings, f"{head}: not composed"
    if options["--config-path"]:
        config_dir = (config_dir.parent / options["--config-path"]).resolve()
    if options["--config-name"]:
        name = options["--config-name"].removesuffix(".yaml")
    findings += _twice(overrides) + _from_environment(overrides)
    outside = next((a for a in overrides if a.text.lstrip("+").startswith("hydra.searchpath=")), None)
    if outside:
        findings.append(Finding(outside.line, NOTE, "hydra.searchpath", "configs come from outside verl, so nothing "
                                "was composed", "check it where that package is installed"))
        return findings, f"{head}: not composed"
    return findings + _composed(launch, release, config_dir, name, overrides), f"{head}, config {name}"


def _cuts(launch: Launch) -> list[Finding]:
    if not launch.dropped:
        return [Finding(line, WARNING, "line continuation", why, "remove what stands behind the backslash")
                for line, why in launch.cuts]
    line, why = launch.cuts[0]
    names = [a.text.partition("=")[0] for a in launch.dropped]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    first, last = launch.dropped[0].line, launch.dropped[-1].line
    return [Finding(line, ERROR, "line continuation", f"{why}: the command ends here, and {len(names)} arguments in "
                    f"lines {first} to {last} never reach it ({', '.join(names[:SHOWN])}{more}). bash runs them as "
                    "separate commands and says 'command not found'",
                    "let every argument follow its backslash directly, comments above the command")]


def _twice(overrides: list[Argument]) -> list[Finding]:
    seen: dict[str, Argument] = {}
    findings = []
    for argument in overrides:
        key, _, value = argument.text.partition("=")
        key = key.lstrip("+")
        if key in seen and seen[key].text.partition("=")[2] != value:
            findings.append(Finding(argument.line, WARNING, key, f"set before in line {seen[key].line}; the last one "
                                    f"counts: {UNKNOWN.sub('$' + chr(92) + '1', value)}", "remove one"))
        seen[key] = argument
    return findings


def _from_environment(overrides: list[Argument]) -> list[Finding]:
    """One note for all values that are nothing but a variable which the script does not set."""
    missing: dict[str, int] = {}
    for argument in overrides:
        found = UNKNOWN.fullmatch(argument.text.partition("=")[2])
        if found and found.group(1).isidentifier():
            missing.setdefault(found.group(1), argument.line)
    if not missing:
        return []
    return [Finding(min(missing.values()), NOTE, ", ".join(missing), "not set in the script, so these values come from "
                    "the environment and were not checked; unset, they are empty",
                    "give them defaults, or check with esgrpo lint SCRIPT NAME=VALUE")]


def _text(argument: Argument) -> str:
    return UNKNOWN.sub(PLACEHOLDER, argument.text)


def _composed(launch: Launch, release: Release, config_dir: Path, name: str, overrides: list[Argument]):
    texts = [_text(argument) for argument in overrides]
    commented = [argument for argument in launch.commented if "=" in argument.text]
    segment = any(SEGMENT in text or "loss_mode=pois" in text or "loss_mode=sais" in text for text in texts)
    answer = release.compose(config_dir, name, texts, segment)
    if answer is not None and "broken" in answer:
        return [Finding(launch.line, ERROR, name, f"does not compose in verl {release.version}: {answer['broken']}",
                        "check --config-path and --config-name")]
    if answer is None:
        return _without_hydra(release, overrides, commented)
    findings = []
    lines: dict[str, int] = {}
    for argument, result in zip(overrides, answer["results"], strict=True):
        lines[result.get("key", argument.text)] = argument.line
        findings += _key(argument, result, answer["keys"], release)
    if commented:
        notes = release.compose(config_dir, name, [_text(argument) for argument in commented], False)
        for argument, result in zip(commented, notes["results"], strict=True):
            findings += [Finding(f.line, NOTE, f.key, f"in a comment: {f.problem}", f.todo)
                         for f in _key(argument, result, answer["keys"], release)]
    device = answer["config"].get("trainer", {}).get("device") if isinstance(answer["config"], dict) else ""
    config = rules.Config(answer["config"], frozenset(lines), launch.module, release.version, str(device),
                          release.flash_default)
    findings += [Finding(_line(lines, key, launch), severity, key, problem, todo)
                 for severity, key, problem, todo in rules.check(config)]
    return findings + _overlay(answer["overlay"], release, lines, launch)


def _line(lines: dict[str, int], key: str, launch: Launch) -> int:
    """The line that sets `key` or something below it, else that of the launch."""
    return lines.get(key) or next((n for k, n in lines.items() if k.startswith(f"{key}.")), launch.line)


def _key(argument: Argument, result: dict, keys: list[str], release: Release) -> list[Finding]:
    """What Hydra, verl's dataclasses and verl's source say of one override."""
    plain = argument.text.partition("=")[0]
    key = result.get("key", plain.lstrip("+~"))
    if "error" in result:
        if result.get("kind") == "key" and result.get("missing"):
            return [Finding(argument.line, ERROR, key, f"unknown in verl {release.version}: nothing is called "
                            f"{result['missing']} {_below(result)}; Hydra stops", _suggestion(key, result, keys))]
        if result.get("kind") == "key" and plain.startswith("+") and "Could not append" in result["error"]:
            return [Finding(argument.line, ERROR, key, f"exists in verl {release.version}, so it cannot be added; "
                            "Hydra stops", f"drop the + (or use ++): {key}=...")]
        return [Finding(argument.line, ERROR, key, result["error"].rstrip("."), "see Hydra's override grammar")]
    missing = result.get("missing")
    if not missing or not plain.startswith("+") or key == SEGMENT or key.startswith(f"{SEGMENT}."):
        return []
    close = difflib.get_close_matches(missing, result["beside"], 1, cutoff=SIMILAR)
    kind = result["target"].rpartition(".")[2]
    fields = release.fields.get(kind) if key.startswith(BUILT) else None
    if fields and missing not in fields and missing not in result["beside"]:
        return [Finding(argument.line, ERROR, key, f"verl's {kind} has no field {missing}: Hydra adds it, and the "
                        "worker that builds the dataclass stops", _suggestion(key, result, keys))]
    passed_on = any(word in f"{result['at']}.{missing}" for word in FREE)
    if missing not in release.names and not passed_on:
        return [Finding(argument.line, ERROR if close else WARNING, key, f"the + makes Hydra accept it, but no source "
                        f"file of verl {release.version} mentions {missing} {_below(result)}: nobody reads it",
                        _suggestion(key, result, keys))]
    return []


def _below(result: dict) -> str:
    return f"below {result['at']}" if result.get("at") else "at the top level"


def _suggestion(key: str, result: dict, keys: list[str]) -> str:
    """The nearest key of the release: a misspelt part, the same name elsewhere, or the nearest whole key."""
    missing, at = result.get("missing", ""), result.get("at", "")
    rest = key[len(at):].lstrip(".").partition(".")[2]
    close = difflib.get_close_matches(missing, result.get("beside", []), 1, cutoff=SIMILAR)
    if close:
        return "did you mean " + ".".join(part for part in (at, close[0], rest) if part) + "?"
    leaf = key.rpartition(".")[2]
    same = [other for other in keys if other.rpartition(".")[2] == leaf or other.endswith(f".{key}")]
    near = difflib.get_close_matches(key, same or keys, 1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return "remove it, or add it with + if something outside verl reads it"


def _without_hydra(release: Release, overrides: list[Argument], commented: list[Argument]) -> list[Finding]:
    """Names only: a part of a key that no YAML file of the release has. Values and places are not checked."""
    findings = [Finding(0, NOTE, "hydra", "not installed here, so nothing was composed: only names of keys were "
                        "checked", "pip install hydra-core, or run this where verl is installed")]
    known = release.config_names
    for argument in overrides + commented:
        plain, note = argument.text.partition("=")[0], argument in commented
        if UNKNOWN.search(plain) or "@" in plain or plain.lstrip("+").startswith(SEGMENT):
            continue
        for part in plain.lstrip("+~").split("."):
            close = difflib.get_close_matches(part, known, 1, cutoff=SIMILAR)
            if part not in known and part not in release.names and (close or not plain.startswith("+")):
                findings.append(Finding(argument.line, NOTE if note else ERROR, plain.lstrip("+~"),
                                        ("in a comment: " if note else "") + f"no config of verl {release.version} has "
                                        f"{part}", f"did you mean {close[0]}?" if close else "remove it"))
                break
    return findings


def _overlay(said: list[dict], release: Release, lines: dict[str, int], launch: Launch) -> list[Finding]:
    """What the overlay needs: its launcher, a release with places for its hooks, and settings of verl."""
    if not said:
        return []
    line = _line(lines, SEGMENT, launch)
    if not recorded.is_supported("verl", release.version):
        return [Finding(line, ERROR, SEGMENT, f"the overlay does not start with verl {release.version}, only with "
                        f"{' and '.join(recorded.of_upstream('verl').supported)}",
                        "use such a release, or drop segment.*")]
    findings = [Finding(line, NOTE, SEGMENT, "is read by the overlay; plain verl stops at the unknown field",
                        "start with: esgrpo run -- bash SCRIPT")]
    for entry in said:
        if "features" in entry:
            findings += [Finding(line, WARNING, SEGMENT, f"{feature} has no hook in verl {release.version}: {why}",
                                 "use another release, or drop it")
                         for feature, why in _without_place(entry["features"], release.version)]
        elif "refusal" in entry:
            who, found, wanted, consequence, todo = entry["refusal"]
            findings.append(Finding(_line(lines, who, launch), ERROR, who, f"{found}, wanted {wanted}; {consequence}",
                                    todo))
        elif "idle" in entry:
            key, _, why = entry["idle"].partition("=")
            findings.append(Finding(_line(lines, key, launch), WARNING, key, why, "drop it, or switch that on"))
        elif "line" in entry:
            key, _, change = entry["line"].partition(": ")
            findings.append(Finding(_line(lines, key, launch), NOTE, key, change, "nothing: the overlay does it"))
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
    """Exit code 1 with an error in the script, else 0."""
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
        say("; ".join(result.checked))
    counts = {severity: sum(f.severity == severity for f in result.findings) for severity in (ERROR, WARNING, NOTE)}
    say(", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items()))
    return 1 if counts[ERROR] else 0
