"""Which source of an upstream a hook accepts: tested, drifted, patched, without metadata; in a fresh process."""


import pytest

from ci.tests.unit.engine_scene import IMPORT, RESULT, UPSTREAM
from esgrpo import engine, releases


@pytest.mark.parametrize("tested, state, said", [
    ("{'1.0': '0123456789abcdef'}", "DRIFTED", "expected 0123456789abcdef"),
    ("{'0.9': '0123456789abcdef'}", "INCOMPATIBLE", "tested 0.9"),
])
def test_untested_source_is_refused(script, tested, state, said):
    found, errors = script(f"declare(tested={tested}); engine.boot(); " + IMPORT + RESULT)
    assert found == {"a": state, "result": "plain x"}
    assert state in errors and said in errors and errors.count("\n") == 1


def test_tested_source_is_accepted_under_an_untested_version(script):
    source = "declare(tested={'0.9': fingerprint.of_targets(('up.mod:f',))[0]}); engine.boot(); " + IMPORT + RESULT
    assert script(source)[0] == {"a": "APPLIED", "result": "hooked plain x"}


@pytest.mark.parametrize("without, state", [
    ('(("==1.0", "the other hook does it"),)', "NOT_NEEDED"), ('((">=1.1", "the other hook does it"),)', "APPLIED"),
    ("()", "APPLIED")])
def test_a_hook_has_no_place_in_some_releases(script, without, state):
    assert script(f"declare(without={without}); engine.boot(); import up.mod; show()")[0]["a"] == state


@pytest.mark.parametrize("version, public", [("0.7.0.dev0", "0.7.0"), ("0.7.0", "0.7.0"), ("2.1.post1+cpu", "2.1"),
                                             ("unknown", "unknown")])
def test_a_checkout_of_a_tag_is_that_release(version, public):
    """verl's tag v0.7.0 calls itself 0.7.0.dev, which a specifier would put before 0.7.0."""
    hook = engine.Hook("a", "up:f", (), "wrap", "", "", without=(("==0.7.0", "reason"),))
    assert releases.public(version) == public
    assert engine.has_no_place(hook, version) == ("reason" if public == "0.7.0" else "")


def test_a_refusal_names_the_git_patches(script):
    said, _ = script("""
declare(tested={"1.0": "0" * 16}, patches=(("==1.0", ("mend-this", "mend-that")), ("==2.0", ("no-such",))))
engine.boot(); import up.mod; show(detail=engine._records['a'].detail)""")
    assert said["a"] == "DRIFTED" and "mend-this, mend-that" in said["detail"] and "apply.sh" in said["detail"]


def test_a_changed_helper_is_drift_too(script, up):
    known = "{'1.0': fingerprint.of_targets(('up.mod:f', 'up.mod:C.method'))[0]}"
    source = f"declare(tested={known}, relies_on=('up.mod:C.method',)); engine.boot(); " + IMPORT + RESULT
    assert script(source)[0]["a"] == "APPLIED"
    fixed = script(f"show(**{known})")[0]["1.0"]
    (up / "up" / "mod.py").write_text(UPSTREAM.replace('def method(self, x): return "plain "',
                                                       'def method(self, x): return "new "', 1))
    assert script(source.replace(known, f"{{'1.0': '{fixed}'}}"))[0] == {"a": "DRIFTED", "result": "plain x"}


PATCHED = UPSTREAM.replace('def f(x): return "plain "', 'def f(x): return "patched "')
CURE = """
names = {{'1.0': '{plain}', '1.0+other': '{other}'}}
declare(tested=names, cured={{'{source}': '{patched}'}}, relies_on=({relies}))
engine.boot(); import up.mod; engine.refresh()
row = engine.states('driver')[0]
show(result=up.mod.f('x'), detail=row['detail'], stops=bool(engine.not_in_place([row])))
"""


def cure_script(up, source="1.0+a", relies=""):
    """A hook that knows the plain source, one that another patch made, and one that needs it no more."""
    from esgrpo import fingerprint

    def taken(text):
        (up / "up" / "mod.py").write_text(text)
        fingerprint._tree.cache_clear()
        return fingerprint.of_targets(("up.mod:f",), [str(up)])[0]

    prints = {name: taken(text) for name, text in (
        ("patched", PATCHED), ("other", PATCHED.replace("patched", "other")), ("plain", UPSTREAM))}
    return CURE.format(**prints, source=source, relies=relies)


@pytest.mark.parametrize("source, by", [("1.0+a", "the git patch a"), ("1.0+b.a", "the git patch a"),
                                        ("1.0+series", "the git patch a"), ("1.0", "up 1.0 itself"),
                                        ("1.0+b", "up 1.0 itself")])
def test_a_patched_source_needs_no_hook(script, up, source, by):
    """The patch is there: the hook on top of it would do the same thing twice."""
    code = cure_script(up, source)
    plain = {"a": "APPLIED", "result": "hooked plain x", "detail": "up 1.0", "stops": False}
    assert script(code)[0] == plain
    (up / "up" / "mod.py").write_text(PATCHED)
    found, errors = script(code)
    assert found == {"a": "NOT_NEEDED", "result": "patched x", "detail": f"cured by {by}", "stops": False}
    assert errors == ""


def test_the_patch_of_another_slug_leaves_the_hook_on(script, up):
    code = cure_script(up)
    (up / "up" / "mod.py").write_text(PATCHED.replace("patched", "other"))
    assert script(code)[0]["result"] == "hooked other x"


def test_a_cured_source_may_lack_what_the_hook_relies_on(script, up):
    code = cure_script(up, relies="'up.mod:gone',")
    assert script(code)[0]["a"] == "DRIFTED"
    (up / "up" / "mod.py").write_text(PATCHED)
    assert script(code)[0]["a"] == "NOT_NEEDED"


def test_an_edited_patched_source_is_drift(script, up):
    code = cure_script(up)
    (up / "up" / "mod.py").write_text(PATCHED.replace('"patched "', '"edited "'))
    assert script(code)[0] == {"a": "DRIFTED", "result": "edited x", "stops": True,
                               "detail": script(code)[0]["detail"]}


def test_a_source_checkout_without_metadata(script, up):
    """Nothing but the source: its fingerprint decides."""
    for file in (up / "up-1.0.dist-info").iterdir():
        file.unlink()
    (up / "up-1.0.dist-info").rmdir()
    source = "declare(); engine.boot(); " + IMPORT + "print(json.dumps(engine.states('driver')[0]))"
    row = script(source)[0]
    assert (row["state"], row["version"]) == ("APPLIED", "unknown")
    (up / "up" / "version").mkdir()
    (up / "up" / "version" / "version").write_text("0.8.0.dev\n")
    row = script(source)[0]
    assert (row["state"], row["version"]) == ("APPLIED", "0.8.0.dev")
    row = script(source.replace("declare()", "declare(tested={'1.0': '0'})"))[0]
    assert row["state"] == "INCOMPATIBLE" and "0.8.0.dev" in row["detail"]


def test_the_git_tag_of_a_release_is_that_release(script, up):
    """verl's tag v0.8.0 says 0.8.0.dev, which PEP 440 sorts before 0.8.0; its source is that of the release."""
    (up / "up-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: up\nVersion: 0.8.0.dev0\n")
    known = "{'0.8.0': fingerprint.of_targets(('up.mod:f',))[0]}"
    assert script(f"declare(tested={known}); engine.boot(); " + IMPORT + RESULT)[0]["a"] == "APPLIED"
    assert script("declare(tested={'0.8.0': '0'}); engine.boot(); " + IMPORT + RESULT)[0]["a"] == "INCOMPATIBLE"
