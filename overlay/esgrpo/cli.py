"""Command line: esgrpo run | status | top | drift | doctor | explain | lint | report."""

from __future__ import annotations

import argparse
import json
import os
import sys

from esgrpo import __version__, records
from esgrpo.arguments import Parser
from esgrpo.errors import EsgrpoError, leave_stdout, say, show
from esgrpo.tools import language

OVERLAY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(arguments) -> int:
    """Set the environment and become CMD."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise EsgrpoError("run", "no command", "esgrpo run -- CMD ...", "nothing was started", "add the command")
    from importlib.util import find_spec

    from esgrpo import engine

    for need in ("wrapt", "packaging"):
        if find_spec(need) is None:
            raise EsgrpoError("run", f"{need} is not installed in {sys.prefix}", "wrapt and packaging",
                              "no hook could be loaded, nothing was started", f"pip install {need}")
    unknown = engine.disabled_slugs() - set(engine.load_hooks()) - {"*"}
    if unknown:
        raise EsgrpoError("ESGRPO_DISABLE", ",".join(sorted(unknown)), "slugs that `esgrpo status` lists",
                          "nothing was started", "correct the name")
    from esgrpo import guard
    from esgrpo.tools import command as checks

    checks.check(command)
    guard.check_command(command)
    environment = dict(os.environ, ESGRPO_ENABLE="1", ESGRPO_PREFIX=sys.prefix)
    if not _loads_by_itself():
        others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != OVERLAY]
        environment["PYTHONPATH"] = os.pathsep.join([OVERLAY, *others])
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:  # ValueError: an empty name, or a null byte in it
        raise EsgrpoError("run", f"{command[0]!r}: {getattr(error, 'strerror', None) or error}",
                          "an executable on PATH", "nothing was started", "check the command") from None


def _loads_by_itself() -> bool:
    """True where site reads our esgrpo.pth: PYTHONPATH would show this environment's packages to every other Python.

    A checkout's overlay/ has the package and sitecustomize.py alone. Raises EsgrpoError for a copy that neither loads.
    """
    import site

    if not os.path.exists(os.path.join(OVERLAY, "esgrpo.pth")):
        return False
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if not any(os.path.exists(place) and os.path.samefile(place, OVERLAY) for place in places):
        raise EsgrpoError("run", f"esgrpo lies in {OVERLAY}, whose esgrpo.pth {sys.executable} does not read",
                          "a site directory of this Python", "no hook would be loaded, nothing was started",
                          "pip install esgrpo without --target, or put overlay/ of a checkout on PYTHONPATH")
    return True


def _every_feature() -> frozenset[str]:
    """All but those that a platform switches on: what is made for another machine is not needed on this one."""
    from esgrpo import engine

    every = {name for record in engine.load_hooks().values() for name in record.hook.features}
    return frozenset(every - set(engine.PLATFORMS.values())) | engine.active_features()


def _static_states() -> list[dict]:
    """What would happen here, from the sources on disk; imports no upstream. A drift shows whatever is on."""
    from esgrpo import engine, releases

    every = _every_feature()
    rows = []
    for record in engine.load_hooks().values():
        hook = record.hook
        state, detail, found = engine.check(hook)
        if state is engine.State.NOT_NEEDED:
            on = engine.check(hook, features=every)
            if on[0] not in engine.ACCEPTED | {engine.State.PENDING}:
                state, detail, found = on[0], f"{on[1]} ({detail})", on[2]
        if state is engine.State.PENDING:
            detail = f"{hook.module} is not imported yet; " + (hook.unguarded or f"tested with the source of {detail}")
        rows.append({"slug": hook.slug, "state": state.value, "upstream": hook.upstream,
                     "version": releases.installed(hook.upstream) or "", "target": hook.target, "found": found,
                     "reason": detail, "process": list(hook.process), "why": hook.why, "remove_when": hook.remove_when})
    return rows


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        show("  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip())


def _run_states(directory: str) -> list[dict]:
    from esgrpo.tools import hook_states, run_dirs

    run_dirs.check("status", directory, "nothing to show")
    name = os.path.join(records.FOLDER, run_dirs.HOOKS)
    path = os.path.join(directory, name)
    if not run_dirs.has_hooks(directory):
        rows = run_dirs.has_rows(directory)
        raise EsgrpoError("status", f"{directory} has {'rows, but ' * rows}no {'states of hooks in ' * rows}{name}",
                          "a run with the overlay whose processes have all answered", "nothing to show",
                          "wait for the run's handshake, or " + (
                              "see its log where it has ended" if rows else run_dirs.ADVICE))
    path = path if os.path.exists(path) else os.path.join(directory, run_dirs.HOOKS)
    return hook_states.read("status", path, "nothing to show")


def status(arguments) -> int:
    """Exit code by the worst state."""
    from esgrpo import engine

    if arguments.books:
        if arguments.run_dir is None:
            raise EsgrpoError("status --books", "no RUN_DIR", "esgrpo status RUN_DIR --books", "nothing to settle",
                              "give the run directory (trainer.default_local_dir)")
        from esgrpo.tools import books

        return books.main(arguments.run_dir, arguments.json)
    if arguments.run_dir is None:
        if arguments.all:
            raise EsgrpoError("status --all", "no RUN_DIR", "esgrpo status RUN_DIR --all", "nothing to show",
                              "give the run directory; without one every hook is shown")
        rows = _static_states()
        if arguments.json:
            print(json.dumps(rows, indent=2))
        else:
            _print_table([["HOOK", "STATE", "UPSTREAM", "REASON"]]
                         + [[r["slug"], r["state"], f"{r['upstream']} {r['version']}".strip(), r["reason"]]
                            for r in rows])
        fine = {state.value for state in engine.ACCEPTED | {engine.State.PENDING}}
        return 0 if all(r["state"] in fine for r in rows) else 1
    from esgrpo.tools import run_dirs

    runs, lost = run_dirs.read_each("status", arguments.run_dir, _of_run)
    several = len(runs) + len(lost) > 1
    if arguments.json:
        found = {os.path.basename(path): {"processes": reports, "modules": [vars(row) for row in modules]}
                 for path, (reports, modules) in runs.items()}
        found |= {os.path.basename(path): {"error": line} for path, line in lost.items()}
        print(json.dumps(found if several else next(iter(found.values())), indent=2))
    else:
        # of several runs, too, what modules decided is what the last lines say
        for path, (reports, _) in runs.items():
            if several:
                show(path)
            _print_hooks(path, reports, arguments.all)
        for path, (_, modules) in runs.items():
            show(f"\n{path}" if several else "")
            _print_modules(modules)
    return 1 if lost or any(
        engine.not_in_place(r["hooks"]) for reports, _ in runs.values() for r in reports) else 0


def _of_run(path: str) -> tuple[list[dict], list]:
    from esgrpo.tools import decided

    reports = _run_states(path)
    return reports, decided.of_directory(path, reports)


def _print_hooks(path: str, reports: list[dict], each: bool) -> None:
    from esgrpo.tools import hook_states

    if each:
        return _print_table(hook_states.everywhere(reports))
    rows, needless = hook_states.folded(reports)
    _print_table(hook_states.by_process(reports))
    show("")
    _print_table(rows)
    show(f"{needless} more hooks are needed in no process of this run; each hook in each process: "
         f"esgrpo status {path} --all")


def _print_modules(modules: list) -> None:
    from esgrpo.tools import decided

    if modules:
        _print_table([["MODULE", "SWITCH", "DECISIONS", "REASON"], *decided.cells(modules)])
    else:
        show("what modules decided: not recorded")


def drift(arguments) -> int:
    from esgrpo.tools import drift as comparison

    return comparison.main(arguments.release)


def _states_of_everything() -> list[dict]:
    """Static states as if every feature were on: what the sources here would let a run have."""
    from esgrpo import engine

    every = {name for record in engine.load_hooks().values() for name in record.hook.features}
    before = os.environ.get("ESGRPO_FEATURES")
    os.environ["ESGRPO_FEATURES"] = ",".join(sorted(every - set(engine.PLATFORMS.values())))
    try:
        return _static_states()
    finally:
        os.environ.pop("ESGRPO_FEATURES")
        os.environ.update({} if before is None else {"ESGRPO_FEATURES": before})


def doctor(arguments) -> int:
    """Look at this environment, or at a log; the exit code is the worst finding."""
    from esgrpo.tools.doctor import checks, environment, logs

    if arguments.log is not None:
        answer = logs.read_file(arguments.log)
        show(json.dumps(logs.as_dict(answer), indent=2) if arguments.json else logs.render(answer))
        return logs.EXIT_CODES[answer.state]
    findings = checks.check(environment.collect(environment.this_host()), _states_of_everything)
    if arguments.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        _print_table([checks.heads()] + [
            [f.name, f.level, f"{f.found} -> {f.fix}" if f.fix else f.found] for f in findings])
    return checks.exit_code(findings)


def explain(arguments) -> int:
    from esgrpo.tools.explain import report

    return report.main(arguments)


def lint(arguments) -> int:
    from esgrpo.tools.lint import check

    return check.main(arguments)


def report(arguments) -> int:
    from esgrpo.tools.report import main as write

    return write(arguments.directory, arguments.out, arguments.trace)


def top(arguments) -> int:
    from esgrpo.tools.top import main as watch

    return watch(arguments.run_dir, arguments.once)


def parser() -> Parser:
    whole = Parser(prog="esgrpo", description="ES-GRPO overlay for verl + vLLM")
    whole.add_argument("--version", action="version", version=f"esgrpo {__version__}")
    commands = whole.add_subparsers(dest="name", required=True)
    sub = commands.add_parser("run", help="run a command with the overlay: esgrpo run -- CMD ...")
    sub.add_argument("command", nargs=argparse.REMAINDER)
    sub.set_defaults(function=run)
    sub = commands.add_parser("status", help="states of all hooks, here or in a run; what each module decided",
                              description="Imports no upstream. Exit code 0: nothing would stop a strict run; 1: a "
                                          "hook is DRIFTED, INCOMPATIBLE, FAILED, LATE, or not where a process of that "
                                          "run needs it, or one of several runs cannot be read; 2: unusable.")
    sub.add_argument("run_dir", nargs="?", help="run directory (trainer.default_local_dir), or one with several below")
    sub.add_argument("--all", action="store_true", help="each hook in each process, those that are not needed, too")
    sub.add_argument("--books", action="store_true", help="do its records add up, over restarts? 0: yes, 1: no")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(function=status)
    sub = commands.add_parser("top", help="the loop of a run, live: replicas, queue, versions, idle time, decisions",
                              description="Reads the rows of the run, also of one that has not begun or has ended; "
                                          "needs rich. Ctrl-C ends it. Where the output is no terminal: one frame. "
                                          "Exit code 0; of one frame 1: no rows yet; 2: unusable.")
    sub.add_argument("run_dir", metavar="RUN_DIR", help="run directory (trainer.default_local_dir), or one with "
                                                         "several below of which one is alive")
    sub.add_argument("--once", action="store_true", help="print one frame and end")
    sub.set_defaults(function=top)
    sub = commands.add_parser("drift", help="what a release changes for the hooks: esgrpo drift vllm==0.33.0",
                              description="Downloads the release, installs nothing. Exit code 0: unchanged, moved or "
                                          "not needed; 1: changed, gone or cured upstream, or a release that the "
                                          "overlay is not made for; 2: unusable.")
    sub.add_argument("release", nargs="+", metavar="NAME==VERSION")
    sub.set_defaults(function=drift)
    sub = commands.add_parser("doctor", help="what is wrong with this environment, or with the run that left a log",
                              description="Imports no upstream. Exit code, by the worst finding: 0: fine; 1: warnings; "
                                          "2: errors. With --log: 0: clean; 1: a known cause; 3: an unknown failure, "
                                          "with its most suspicious line; 4: unfinished, with no sign of an error; "
                                          "5: unreadable; 6: empty; 2: no such file, or wrong arguments.")
    sub.add_argument("--log", metavar="FILE", help="recognise the failure in a training log, plain or packed "
                                                     "(gzip, bzip2, xz), UTF-8 or UTF-16; - reads standard input")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(function=doctor)
    sub = commands.add_parser("explain", help="what a metric means: esgrpo explain count/staleness_samples",
                              description="With --log: the values of a run, their arithmetic, and which side waits.")
    sub.add_argument("metric", nargs="?", default="all", help="name, part of a name, or all")
    sub.add_argument("--log", metavar="FILE", help="console or JSONL log of a run, - for stdin")
    sub.set_defaults(function=explain)
    sub = commands.add_parser("lint", help="check a launch script of verl: esgrpo lint SCRIPT [NAME=VALUE ...]",
                              description="Nothing is run. Exit code 0: no error; 1: errors; 2: unusable, or a "
                                          "launch that could not be checked against its configuration.")
    sub.add_argument("script")
    sub.add_argument("variable", nargs="*", metavar="NAME=VALUE", help="environment that the script would see")
    sub.add_argument("--verl", help="release (0.9.1) or root of a checkout; default: what the recipe's "
                                       "REQUIRED_VERL.txt asks for, the checkout that the script lies in, or the "
                                       "installed one")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(function=lint)
    sub = commands.add_parser("report", help="one page of all results in a directory, or a Chrome trace",
                              description="Reads result files (*.json) and run directories; needs matplotlib.")
    sub.add_argument("directory", metavar="DIR", help="such as bench/results, or a run directory")
    sub.add_argument("--out", metavar="FILE.html", help="default: DIR/report.html; Markdown lies beside it")
    sub.add_argument("--trace", metavar="FILE.json", help="instead: requests on replicas, for Perfetto")
    sub.set_defaults(function=report)
    for name in ("doctor", "lint", "explain", "drift", "top"):
        commands.choices[name].add_argument("--lang", choices=language.LANGUAGES,
                                            help="language of the answer; default: Chinese where the locale is "
                                                 "(LC_ALL, LC_MESSAGES, LANG), else English")
    return whole


def main(argv: list[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: `esgrpo status >&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    arguments = parser().parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale without Chinese characters must not end a command
    try:
        with language.speaking(language.asked(getattr(arguments, "lang", None), os.environ)):
            code = arguments.function(arguments)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except EsgrpoError as error:
        say(error)
        return 2
    except BrokenPipeError:  # `esgrpo status | head`
        leave_stdout()
        return 0
    except OSError as error:  # a full disk, or a file that must not be read
        found = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        say(EsgrpoError(arguments.name, found, "files that can be read and written", "stopped there",
                        "correct the path, its rights, or the room on its disk"))
        leave_stdout()
        return 2
    except KeyboardInterrupt:
        say(EsgrpoError(arguments.name, "interrupted", "a whole answer", "stopped there", "run it again"))
        return 130


if __name__ == "__main__":
    sys.exit(main())
