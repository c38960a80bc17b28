"""The command that records fingerprints: what did not change, what is named, nothing else; on a throw-away upstream."""

from __future__ import annotations

import pytest

from ci import record_hooks
from esgrpo import compat, engine, recorded
from esgrpo.tools import drift, upstreams

SOURCES = {"1.0": ("first", "helper"), "1.1": ("first", "helper"), "1.2": ("second", "helper"), "2.0": ("third", "new")}


@pytest.fixture
def up(tmp_path, monkeypatch):
    """An upstream with four releases, two hooks on it, its file with 1.0 recorded; `hooks` may be changed."""
    for version, (f, g) in SOURCES.items():
        package = tmp_path / version / "up"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "mod.py").write_text(f'def f(x): return "{f}"\n\ndef g(x): return "{g}"\n')
    records = {slug: engine.Record(engine.Hook(slug, f"up.mod:{name}", ("driver",), "wrap", "why", "when"), None)
               for slug, name in (("a-hook", "f"), ("other-hook", "g"))}
    monkeypatch.setattr(engine, "load_hooks", lambda: records)
    monkeypatch.setattr(recorded, "DIRECTORY", tmp_path / "fingerprints")
    monkeypatch.setattr(upstreams, "sources", lambda upstream, version, say=print: tmp_path / version)
    rows = [compat.Tested("contract", "2026-01-01", {"up": version}) for version in ("1.0", "1.1", "1.2")]
    monkeypatch.setattr(compat, "load", lambda: rows)
    monkeypatch.setattr(record_hooks.docs, "main", lambda arguments: None)
    (tmp_path / "fingerprints").mkdir()
    recorded.path_of("up").write_text('supported = [">=1,<2"]\n')
    recorded.of_upstream.cache_clear()
    yield records
    recorded.of_upstream.cache_clear()


def releases(slug: str) -> list[str]:
    return list(recorded.of_upstream("up").hooks.get(slug, recorded.NOTHING).fingerprints)


def test_a_new_hook_is_one_command_and_older_releases_with_its_source_have_it(up, capsys):
    assert record_hooks.main(["up==1.1", "--accept", "a-hook", "other-hook"]) == 0
    assert releases("a-hook") == ["1.0", "1.1"] and releases("other-hook") == ["1.0", "1.1", "1.2"]
    text = recorded.path_of("up").read_text()
    assert text.count('["1.0", "1.1"]') == 1 and '"2.0"' not in text


def test_what_did_not_change_needs_no_name_and_what_did_is_shown_and_refused(up, capsys):
    record_hooks.main(["up==1.1", "--accept", "a-hook", "other-hook"])
    before = recorded.path_of("up").read_text()
    capsys.readouterr()
    assert record_hooks.main(["up==1.2"]) == 1
    out, errors = capsys.readouterr()
    assert out.count("-    return 'first'") == 1 and "+    return 'second'" in out and "1 unchanged" in out
    assert errors.startswith("esgrpo: not recorded: a-hook at up 1.2 | ") and errors.count(" | ") == 3
    assert recorded.path_of("up").read_text() == before and releases("a-hook") == ["1.0", "1.1"]
    assert record_hooks.main(["up==1.2", "--accept", "a-hook"]) == 0
    assert releases("a-hook") == ["1.0", "1.1", "1.2"]


def test_another_source_under_a_recorded_release_is_refused_also_where_every_release_is_meant(up, tmp_path, capsys):
    record_hooks.main(["up==1.0", "--accept", "a-hook", "other-hook"])
    assert record_hooks.main(["up"]) == 0  # 1.2 was never tested with the first hook: no refusal
    assert "1 not tested there" in capsys.readouterr().out
    (tmp_path / "1.1" / "up" / "mod.py").write_text('def f(x): return "edited"\n\ndef g(x): return "helper"\n')
    assert record_hooks.main(["up"]) == 1
    assert "a-hook at up 1.1" in capsys.readouterr().err and releases("a-hook") == ["1.0", "1.1"]


def test_accept_all_names_each_hook_and_the_release_becomes_supported(up, capsys):
    record_hooks.main(["up==1.0", "--accept", "a-hook", "other-hook"])
    assert not recorded.is_supported("up", "2.0")
    capsys.readouterr()
    assert record_hooks.main(["up==2.0", "--accept-all"]) == 0
    out = capsys.readouterr().out
    assert all(f"{slug}: up 2.0: new source" in out for slug in up) and "+    return 'third'" in out
    assert recorded.is_supported("up", "2.0") and "2.0" in releases("other-hook")


def test_a_target_that_is_gone_cannot_be_accepted(up, tmp_path, capsys):
    record_hooks.main(["up==1.0", "--accept", "a-hook", "other-hook"])
    (tmp_path / "1.2" / "up" / "mod.py").write_text('def g(x): return "helper"\n')
    assert record_hooks.main(["up==1.2", "--accept", "a-hook"]) == 1
    assert "up.mod:f is missing: refused" in capsys.readouterr().out and "1.2" not in releases("a-hook")


def test_a_release_that_does_the_work_itself_is_recorded_as_cured(up, monkeypatch):
    record_hooks.main(["up==1.0", "--accept", "a-hook", "other-hook"])
    assert record_hooks.main(["up==1.2", "--cured", "a-hook"]) == 0
    assert list(recorded.of_upstream("up").hooks["a-hook"].cured) == ["1.2"]
    assert engine.cured_by(up["a-hook"].hook, [str(upstreams.sources("up", "1.2"))])[0] == "up 1.2 itself"
    assert drift.acting("up", "1.2") == (2, 2)


def test_a_hook_that_is_gone_leaves_nothing(up, capsys):
    record_hooks.main(["up==1.0", "--accept", "a-hook", "other-hook"])
    del up["a-hook"]
    assert record_hooks.main([]) == 0
    assert "dropped: a-hook" in capsys.readouterr().out and "a-hook" not in recorded.path_of("up").read_text()
    assert releases("other-hook") == ["1.0", "1.1", "1.2"]


@pytest.mark.parametrize("arguments", [["up==1.0", "--accept", "no-hook"], ["--accept", "a-hook"], ["nothing==1.0"],
                                       ["up", "--tree", "."]])
def test_a_wrong_call_is_answered_in_one_line(up, capsys, arguments):
    before = recorded.path_of("up").read_text()
    assert record_hooks.main(arguments) == drift.UNUSABLE
    errors = capsys.readouterr().err
    assert errors.startswith("esgrpo: ") and errors.count("\n") == 1 and recorded.path_of("up").read_text() == before


def test_a_patched_checkout_is_recorded_where_it_differs_and_as_cured_by_the_patch_of_the_same_slug(up, tmp_path,
                                                                                                   monkeypatch):
    """Stand-in trees: the patch a-hook changes f, the patch other changes g; a hook that presumes sees the series."""
    def trees(tree, patches):
        yield (), tree
        for number, slugs in enumerate((("a-hook",), ("other",), ("a-hook", "other"))):
            package = tmp_path / f"patched{number}" / "up"
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text("")
            (package / "mod.py").write_text(f'def f(x): return "{"mended" if "a-hook" in slugs else "first"}"\n\n'
                                            f'def g(x): return "{"mended" if "other" in slugs else "helper"}"\n')
            yield slugs, package.parent

    class Patches:
        slugs = ["a-hook", "other"]

    monkeypatch.setattr(record_hooks, "_trees", trees)
    hook = up["other-hook"].hook
    seen = record_hooks.look([record.hook for record in up.values()], "1.0", tmp_path / "1.0", Patches())
    assert list(seen["a-hook"].joint) == [""] and list(seen["a-hook"].target) == ["+a-hook"]
    assert list(seen["other-hook"].joint) == ["", "+other"] and not seen["other-hook"].target
    presuming = engine.Hook(**{**vars(hook), "patches": (("==1.0", ("other",)),)})
    seen = record_hooks.look([presuming], "1.0", tmp_path / "1.0", Patches())
    assert list(seen["other-hook"].joint) == [""]  # of the whole series alone
