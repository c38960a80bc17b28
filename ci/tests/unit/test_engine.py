"""Every state of a hook, and every order of import, apply and revert, with a throw-away upstream in a fresh process."""

import json

import pytest

from ci.tests.unit.engine_scene import HELPERS, IMPORT, RESULT, UPSTREAM
from esgrpo import engine, releases


def test_pending_until_the_target_is_imported(script):
    assert script("declare(); engine.boot(); show()")[0] == {"a": "PENDING"}


def test_applied_when_the_target_is_imported(script):
    assert script("declare(); engine.boot(); " + IMPORT + RESULT)[0] == {"a": "APPLIED", "result": "hooked plain x"}


def test_without_boot_nothing_is_replaced(script):
    assert script("declare(); " + IMPORT + RESULT)[0] == {"a": "PENDING", "result": "plain x"}


def test_not_needed_while_the_feature_is_off(script):
    found, errors = script("declare(features=('segment', 'prune')); engine.boot(); " + IMPORT + RESULT)
    assert found == {"a": "NOT_NEEDED", "result": "plain x"} and errors == ""


def test_not_needed_in_another_kind_of_process(script):
    source = "declare(); engine.boot(); print(json.dumps(engine.states('engine-core')[0]))"
    row = script(source)[0]
    assert (row["state"], row["needed"]) == ("NOT_NEEDED", False)
    assert script(source.replace("engine-core", "driver"))[0]["needed"] is True


@pytest.mark.parametrize("value, state", [("a", "DISABLED"), ("*", "DISABLED"), (" a , b ", "DISABLED"),
                                          ("b", "APPLIED"), ("", "APPLIED")])
def test_disabled_by_name(script, value, state):
    found, errors = script("declare(); engine.boot(); " + IMPORT + RESULT, ESGRPO_DISABLE=value)
    assert found == {"a": state, "result": "plain x" if state == "DISABLED" else "hooked plain x"}
    assert ("a DISABLED (ESGRPO_DISABLE)" in errors) == (state == "DISABLED")


def test_absent_upstream(script):
    source = "declare(target='gone.mod:f', tested={'1.0': '0'}); engine.boot(); show()"
    assert script(source)[0] == {"a": "ABSENT"}
    assert script(source.replace("gone.mod", "up.gone"))[0] == {"a": "DRIFTED"}  # installed, other source
    assert script("declare(target='gone.mod:f', tested={}); engine.boot(); show()")[0] == {"a": "ABSENT"}


def test_a_missing_target_is_named(script):
    _, errors = script("declare(target='up.mod:gone', tested={'1.0': '0'}); engine.boot(); import up.mod; show()")
    assert "a DRIFTED (up 1.0: up.mod:gone is missing" in errors


def test_late_when_the_target_came_first(script):
    assert script(IMPORT + "declare(); engine.boot()" + RESULT)[0] == {"a": "LATE", "result": "plain x"}
    refreshed = script(IMPORT + "declare(); engine.boot(); engine.refresh()" + RESULT)[0]
    assert refreshed["a"] == "LATE"  # copies of the name may be anywhere by now


def test_failed_when_the_hook_raises_and_upstream_still_imports(script):
    found, errors = script("def bad(original): raise KeyError('broken hook')\n"
                           "declare(build=bad); engine.boot(); " + IMPORT + "import up.mod\n" + RESULT)
    assert found == {"a": "FAILED", "result": "plain x"}
    assert "a FAILED (KeyError: 'broken hook')" in errors and errors.count("\n") == 1


def test_failed_when_the_read_back_finds_the_original(script):
    source = "declare(target='up.mod:{}.method'); engine.boot(); import up.mod; show(r=up.mod.{}().method('x'))"
    found, errors = script(source.replace("{}", "Ignores"))
    assert found == {"a": "FAILED", "r": "plain x"} and "read-back found the original" in errors
    assert script(source.replace("{}", "C"))[0] == {"a": "APPLIED", "r": "hooked plain x"}


ADD = """
def apply(module): {}
declare(kind='add', build=types.SimpleNamespace(apply=apply, installed=lambda module: hasattr(module, 'extra')))
engine.boot(); import up.mod; show(extra=hasattr(up.mod, 'extra'))
"""


def test_an_added_thing_is_read_back(script):
    assert script(ADD.format("module.extra = 1"))[0] == {"a": "APPLIED", "extra": True}
    assert script(ADD.format("pass"))[0] == {"a": "FAILED", "extra": False}


def test_an_added_thing_cannot_be_reverted(script):
    source = ADD.format("module.extra = 1") + "try: engine.revert('a')\nexcept engine.HookError: pass\nshow()"
    assert script(source)[0] == {"a": "APPLIED"}


FEATURE = "import os; declare(features=('segment',){}); engine.boot(); import up.mod, up.alias\n"
KNOWN = "os.environ['ESGRPO_FEATURES'] = 'segment'; engine.refresh()\n"
BOTH = "show(result=up.mod.f('x'), alias=up.alias.f('x'))"


def test_refresh_applies_when_the_feature_becomes_known(script):
    before, after = FEATURE.format("") + BOTH, FEATURE.format("") + KNOWN + BOTH
    assert script(before)[0]["a"] == "NOT_NEEDED"
    assert script(after)[0] == {"a": "APPLIED", "result": "hooked plain x", "alias": "plain x"}  # why rebinds exist


def test_an_alias_needs_a_rebind(script):
    source = FEATURE.format(", rebinds=('up.alias:f', 'up.gone:f')") + KNOWN
    assert script(source + BOTH)[0]["alias"] == "hooked plain x"
    assert script(source + "engine.revert('a'); " + BOTH)[0] == {"a": "PENDING", "result": "plain x",
                                                                 "alias": "plain x"}


def test_a_foreign_object_under_the_alias_name_is_left_alone(script):
    source = FEATURE.format(", rebinds=('up.alias:f',)") + "up.alias.f = lambda x: 'foreign'\n" + KNOWN + BOTH
    assert script(source)[0] == {"a": "APPLIED", "result": "hooked plain x", "alias": "foreign"}


@pytest.mark.parametrize("value, feature", [("cpu", "cpu"), (" CPU ", "cpu"), ("huawei", "npu"), ("Huawei", "npu"),
                                            ("npu", None), ("nvidia", None), ("", None)])
def test_a_platform_that_the_user_names_is_a_feature(script, value, feature):
    """In verl's words: its NPU platform is called "huawei", and any other word stops verl."""
    source = "print(json.dumps(sorted(engine.active_features())))"
    assert script(source, VERL_PLATFORM=value, ESGRPO_FEATURES="segment")[0] == sorted({"segment", feature} - {None})


STEPS = {"import": "import up.mod", "boot": "engine.boot()", "refresh": "engine.refresh()",
         "revert": "engine.revert('a')"}


@pytest.mark.parametrize("order, state, result", [
    ("boot import boot", "APPLIED", "hooked plain x"), ("boot boot import import", "APPLIED", "hooked plain x"),
    ("boot import refresh refresh", "APPLIED", "hooked plain x"), ("boot refresh import", "APPLIED", "hooked plain x"),
    ("import boot", "LATE", "plain x"), ("import boot refresh boot", "LATE", "plain x"),
    ("boot import revert", "PENDING", "plain x"), ("boot import revert revert", "PENDING", "plain x"),
    ("boot import revert refresh", "APPLIED", "hooked plain x"), ("boot revert import", "APPLIED", "hooked plain x"),
    ("boot import revert refresh revert", "PENDING", "plain x"), ("refresh import", "PENDING", "plain x"),
    ("boot import revert refresh refresh", "APPLIED", "hooked plain x"),
])
def test_every_order(script, order, state, result):
    source = "declare()\n" + "\n".join(STEPS[step] for step in order.split())
    assert script(source + RESULT)[0] == {"a": state, "result": result}


@pytest.mark.parametrize("call", ["C().method('x')", "C().inherited('x')", "C().static('x')", "C.static('x')",
                                  "C().klass('x')", "C.klass('x')", "f('x')"])
def test_every_kind_of_callable(script, call):
    """Called as before, and gone without a trace after revert; a base class is not touched through its subclass."""
    name = call.partition("(")[0] if call == "f('x')" else "C." + call.partition(".")[2].partition("(")[0]
    tested = ", tested={}" if name == "C.inherited" else ""  # no definition of that name to take a fingerprint of
    source = (f"import importlib; plain = importlib.machinery.SourceFileLoader('m', {{0}}).load_module()\n"
              f"declare(target='up.mod:{name}'{tested}); engine.boot(); import up.mod\n"
              f"hooked = up.mod.{call}; base = up.mod.Base().inherited('x'); state = engine.states('driver')[0]\n"
              f"engine.revert('a')\n"
              f"show(hooked=hooked, base=base, was=state['state'], after=up.mod.{call}, plain=plain.{call},\n"
              f"     left='inherited' in vars(up.mod.C))").replace("{0}", "fingerprint.source_file('up.mod')")
    found = script(source)[0]
    assert found["was"] == "APPLIED" and found["hooked"] == "hooked " + found["plain"]
    assert found["after"] == found["plain"] and found["base"] == "plain x" and found["left"] is False


def test_a_coroutine_stays_one(script):
    source = ("def tag_async(original):\n    @functools.wraps(original)\n    async def later(*args):\n"
              "        return 'hooked ' + await original(*args)\n    return later\n"
              "declare(target='up.mod:C.later', build=tag_async); engine.boot(); import asyncio, up.mod\n"
              "show(result=asyncio.run(up.mod.C().later('x')))")
    assert script(source)[0] == {"a": "APPLIED", "result": "hooked plain x"}


def test_two_hooks_on_one_target(script):
    found = script("declare('a'); declare('b'); engine.boot(); " + IMPORT + RESULT)[0]
    assert found == {"a": "APPLIED", "b": "APPLIED", "result": "hooked hooked plain x"}


MAIN = UPSTREAM + HELPERS + """
declare(target='up.run:f', tested={'1.0': fingerprint.of_targets(('up.run:f',))[0]})
engine.boot()
EXTRA
engine.refresh()
show(main=f('x'), named=sys.modules['up.run'].f('x') if 'up.run' in sys.modules else None)
"""


@pytest.mark.parametrize("extra, named", [("", None), ("import up.imports_run", "hooked plain x")])
def test_a_target_that_runs_as_main(run_python, up, overlay, extra, named):
    """`python -m up.run`: the module is called __main__, and its own helpers may import it once more by name."""
    main = "".join(f"    {line}\n" for line in MAIN.replace("EXTRA", extra).splitlines())
    (up / "up" / "run.py").write_text(f"if __name__ == '__main__':\n{main}else:\n    {UPSTREAM.splitlines()[1]}\n")
    (up / "up" / "imports_run.py").write_text("import up.run\n")
    done = run_python("-m", "up.run", path=(overlay, up))
    assert json.loads(done.stdout) == {"a": "APPLIED", "main": "hooked plain x", "named": named}
    (up / "up" / "run.py").write_text((up / "up" / "run.py").read_text().replace("    engine.refresh()", "    pass"))
    without = json.loads(run_python("-m", "up.run", path=(overlay, up)).stdout)["main"]
    assert without == ("hooked plain x" if extra else "plain x")  # importing it by name finds both copies


def test_a_hook_that_arrives_with_the_actor(script):
    """Ray ships the class by value: its method carries the hook, its module is never imported here."""
    source = ("class C:\n    def method(self): pass\n"
              "declare(target='up.mod:C.method'); engine.boot()\n"
              "plain = engine.states('driver', C())[0]['state']; setattr(C.method, engine.MARKER, 'a')\n"
              "other = engine.states('driver', object())[0]['state']\n"
              "print(json.dumps([plain, other, engine.states('driver', C())[0]['state']]))")
    assert script(source)[0] == ["PENDING", "PENDING", "APPLIED"]


def test_report_and_what_is_not_in_place(script):
    source = ("declare('a'); declare('b', target='up.mod:C.method', tested={'1.0': '0'})\n"
              "declare('c', target='up.gone:f', tested={'1.0': '0'}, features=('prune',)); engine.boot(); " + IMPORT
              + "report = engine.report('driver'); report['missing'] = engine.not_in_place(report['hooks'])\n"
              "report['elsewhere'] = engine.not_in_place(engine.report('trainer')['hooks'])\n"
              "print(json.dumps(report))")
    report = script(source, ESGRPO_STRICT="0", ESGRPO_FEATURES="segment")[0]
    assert [row["state"] for row in report["hooks"]] == ["APPLIED", "DRIFTED", "NOT_NEEDED"]
    assert [row["slug"] for row in report["missing"]] == ["b"] and report["elsewhere"] == []
    assert (report["process"], report["strict"], report["features"]) == ("driver", False, ["segment"])
    assert report["pid"] > 0 and report["host"] and report["disabled"] == []
    accepted = script(source, ESGRPO_DISABLE="b")[0]
    assert accepted["missing"] == [] and accepted["disabled"] == ["b"] and accepted["strict"] is True


@pytest.mark.parametrize("state", list(engine.State))
def test_what_stops_a_run(state):
    row = {"slug": "a", "state": state.value, "needed": True}
    stops = state.value not in ("APPLIED", "NOT_NEEDED", "ABSENT", "DISABLED")
    assert bool(engine.not_in_place([row])) == stops
    assert engine.not_in_place([{**row, "needed": False}]) == []


def test_the_boot_line_shows_the_switches(script):
    source = "declare(); engine.boot(); " + IMPORT + "print(json.dumps(engine.boot_line()))"
    assert script(source)[0].endswith("1 applied, 0 wait for their target; nothing odd")
    line = script(source, ESGRPO_STRICT="0", ESGRPO_DISABLE="z,a")[0]
    assert line.endswith("a DISABLED (ESGRPO_DISABLE) ESGRPO_STRICT=0 ESGRPO_DISABLE=a,z") and "\n" not in line


def test_boot_is_idempotent_and_refuses_a_slug_twice(script):
    source = ("module = types.ModuleType('esgrpo.hooks.one'); import esgrpo.hooks\n"
              "module.HOOK = Hook('a', 'up.mod:f', ('driver',), 'wrap', 'why', 'when', unguarded='a test')\n"
              "module.build = tag\n"
              "sys.modules['esgrpo.hooks.one'] = sys.modules['esgrpo.hooks.two'] = module\n"
              "esgrpo.hooks.files = lambda: {}\n"
              "try: engine.boot(); engine.boot(); import up.mod; print(json.dumps(up.mod.f('x')))\n"
              "except engine.HookError as error: print(json.dumps(str(error)))")
    assert script(source.replace("{}", "('one',)"))[0] == "hooked plain x"
    assert "esgrpo: a: declared twice" in script(source.replace("{}", "('one', 'two')"))[0]


def test_the_version_of_an_upstream_is_read_once_for_a_path(tmp_path, monkeypatch):
    def made(folder: str, version: str):
        (tmp_path / folder / "upstream_of_a_test.dist-info").mkdir(parents=True)
        (tmp_path / folder / "upstream_of_a_test.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: upstream-of-a-test\nVersion: {version}+cpu\n")
        return tmp_path / folder

    reads, read = [], releases.metadata.version
    monkeypatch.setattr(releases.metadata, "version", lambda name: reads.append(name) or read(name))
    name = "upstream-of-a-test"
    assert releases.installed(name) is None and releases.installed(name) is None
    assert len(reads) == 4  # it may come: both names are asked for each time
    monkeypatch.syspath_prepend(made("old", "1.0"))
    assert [releases.installed(name) for _ in range(3)] == ["1.0"] * 3 and len(reads) == 5
    monkeypatch.syspath_prepend(made("new", "2.0"))
    assert releases.installed(name) == "2.0" and len(reads) == 6
