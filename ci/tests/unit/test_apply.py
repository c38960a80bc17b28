"""apply.sh: all or nothing, exact, and able to say what state a tree is in."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo.tools import apply, patchset

_spec = importlib.util.spec_from_file_location("patch_sets", Path(__file__).with_name("patch_sets.py"))
patch_sets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(patch_sets)
SLUGS = list(patch_sets.CHANGES)


@pytest.fixture(scope="module")
def patches(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    patch_sets.make(root / "patches", root / "scratch")
    return root / "patches"


@pytest.fixture
def tree(tmp_path, patches, monkeypatch) -> Path:
    monkeypatch.setattr(apply, "PATCHES", patches)
    return patch_sets.write_tree(tmp_path / "a tree")


def content(tree: Path) -> dict[str, bytes]:
    return {str(p.relative_to(tree)): p.read_bytes() for p in sorted(tree.rglob("*")) if p.is_file()}


def run(capsys, *arguments) -> tuple[int, str]:
    code = apply.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out + captured.err


def test_apply_status_reverse_restores_every_byte(tree, capsys):
    before = content(tree)
    assert run(capsys, "--check", tree)[0] == 0
    assert content(tree) == before
    code, out = run(capsys, tree)
    assert code == 0 and "+ git apply" in out and "next:" in out
    assert content(tree) != before and "pkg/c.py" in content(tree)
    code, out = run(capsys, "--status", tree)
    assert code == 0 and out.startswith("pkg v1: applied") and out.count("applied") == 1 + len(SLUGS)
    again = content(tree)
    code, out = run(capsys, tree)
    assert code == 0 and content(tree) == again and "nothing to do" in out and "+ git" not in out  # idempotent
    assert run(capsys, "--reverse", tree)[0] == 0
    assert content(tree) == before
    assert "pristine" in run(capsys, "--status", tree)[1]


def test_only_and_its_needs(tree, capsys):
    before = content(tree)
    assert run(capsys, "--only", "change-first-line", tree)[0] == 0
    out = run(capsys, "--status", tree)[1]
    assert out.startswith("pkg v1: partial") and out.count("applied") == 1
    code, out = run(capsys, "--only", "build-on-that", tree)
    assert code == 5 and "name the others" in out
    assert run(capsys, "--only", "change-last-line,build-on-that", tree)[0] == 0
    code, out = run(capsys, "--reverse", "--only", "change-last-line", tree)
    assert code == 5
    assert run(capsys, "--reverse", "--only", "change-first-line", tree)[0] == 0
    assert run(capsys, "--reverse", tree)[0] == 0
    assert content(tree) == before
    assert run(capsys, "--only", "no-such-slug", tree)[0] == 2


def test_modified_file(tree, capsys):
    (tree / "pkg/a.py").write_text("other\n")
    before = content(tree)
    code, out = run(capsys, tree)
    assert code == 4 and "pkg/a.py" in out and content(tree) == before
    code, out = run(capsys, "--status", tree)
    assert code == 0 and "edited" in out and "add-new-file       pristine" in out


def test_crlf_is_named(tmp_path, tree, capsys):
    other = patch_sets.write_tree(tmp_path / "crlf", newline="\r\n")
    shutil.copy(tree / "pkg/b.py", other / "pkg/b.py")
    code, out = run(capsys, other)
    assert code == 4 and "CRLF" in out and "autocrlf" in out


def test_missing_file_names_it_and_the_way_out(tree, capsys):
    (tree / "pkg/b.py").unlink()
    code, out = run(capsys, tree)
    assert code == 5 and "pkg/b.py" in out and "git checkout" in out


def test_unknown_tree_and_usage(tmp_path, tree, capsys):
    (tmp_path / "empty").mkdir()
    assert run(capsys, tmp_path / "empty")[0] == 3
    assert run(capsys, "--status", tmp_path / "empty")[0] == 3
    assert run(capsys, tmp_path / "nowhere")[0] == 2
    assert run(capsys)[0] == 2
    assert run(capsys, "--installed", "no_such_package")[0] == 2
    with pytest.raises(SystemExit) as caught:
        apply.main(["--no-such-flag"])
    assert caught.value.code == 2


def test_a_new_file_that_is_already_there_is_not_overwritten(tree, capsys):
    (tree / "pkg/c.py").write_text("mine\n")
    assert run(capsys, tree)[0] == 4
    assert (tree / "pkg/c.py").read_text() == "mine\n"


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_interrupted_run_can_be_finished_or_taken_back(tree, capsys, monkeypatch, moves):
    before = content(tree)
    real, count = os.replace, 0

    def interrupted(source, target):
        nonlocal count
        if count == moves:
            raise KeyboardInterrupt
        count += 1
        real(source, target)

    monkeypatch.setattr(apply.os, "replace", interrupted)
    assert run(capsys, tree)[0] == 130
    monkeypatch.setattr(apply.os, "replace", real)
    assert not (tree / apply.STAGING).exists()
    middle = content(tree)
    assert run(capsys, tree)[0] == 0
    assert "applied" in run(capsys, "--status", tree)[1].splitlines()[0]
    for name in set(content(tree)) - set(middle):
        (tree / name).unlink()
    for name, data in middle.items():
        (tree / name).write_bytes(data)
    assert run(capsys, "--reverse", tree)[0] == 0
    assert content(tree) == before


def test_read_only_tree(tree, capsys, monkeypatch):
    before = content(tree)
    real = os.access
    monkeypatch.setattr(apply.os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))  # root may write
    code, out = run(capsys, tree)
    assert code == 5 and "read-only" in out and content(tree) == before


def test_check_of_a_read_only_tree_says_so(tree, capsys, monkeypatch):
    real = os.access
    monkeypatch.setattr(apply.os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    code, out = run(capsys, "--check", tree)
    assert code == 5 and "read-only" in out and "applies" not in out


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o664])
def test_file_mode_is_kept(tree, capsys, mode):
    (tree / "pkg/b.py").chmod(mode)
    for arguments in ([tree], ["--reverse", tree]):
        assert run(capsys, *arguments)[0] == 0
        assert stat.S_IMODE((tree / "pkg/b.py").stat().st_mode) == mode


@pytest.mark.parametrize("flag", [[], ["--check"]])
def test_a_link_is_neither_followed_nor_replaced(tree, tmp_path, capsys, flag):
    """It may lead into a cache that other environments share."""
    (tree / "pkg/b.py").rename(tmp_path / "shared.py")
    (tree / "pkg/b.py").symlink_to(tmp_path / "shared.py")
    before = content(tree)
    code, out = run(capsys, *flag, tree)
    assert code == 5 and f"pkg/b.py is a link to {tmp_path / 'shared.py'}" in out and out.count("wanted") == 1
    assert content(tree) == before and (tree / "pkg/b.py").is_symlink()
    assert run(capsys, "--only", "change-last-line", tree)[0] == 0  # touches pkg/a.py alone


def test_only_asks_for_the_files_of_its_patches(tree, capsys):
    (tree / "pkg/b.py").write_text("mine\n")
    code, out = run(capsys, "--only", "change-first-line", tree)
    assert code == 4 and "pkg/b.py" in out
    assert run(capsys, "--only", "change-last-line", tree)[0] == 0
    assert run(capsys, "--reverse", "--only", "change-last-line", tree)[0] == 0
    (tree / "pkg/b.py").unlink()
    assert run(capsys, "--only", "change-last-line", tree)[0] == 0
    assert run(capsys, "--only", "change-first-line", tree)[0] == 5


def test_without_patches_it_says_where_they_are(tree, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(apply, "PATCHES", tmp_path / "nowhere")
    for arguments in (["--list"], ["--check", tree]):
        code, out = run(capsys, *arguments)
        assert code == 2 and "no patch set in" in out and "checkout of this project" in out


def test_the_page_of_releases_has_every_exit_code(root):
    codes = (apply.USAGE, apply.UNKNOWN, apply.MODIFIED, apply.NOT_APPLICABLE, apply.MISMATCH)
    for end, first, mark in (("", "Exit codes: 0 ", "; "), ("_zh", "退出码：0 ", "；")):
        page = (root / "docs" / f"compatibility{end}.md").read_text(encoding="utf-8")
        text = page.replace("\n", " ").partition(first)[2]
        assert text and all(re.search(f"{mark} ?{code} ", text) for code in codes), end


def test_damaged_patch_changes_nothing(tree, patches, tmp_path, capsys, monkeypatch):
    copy = tmp_path / "patches"
    shutil.copytree(patches, copy)
    path = copy / "pkg/v1/change-first-line.patch"
    path.write_text(path.read_text().replace("+line_1 = -1", "+line_1 = -2"))
    monkeypatch.setattr(apply, "PATCHES", copy)
    before = content(tree)
    code, out = run(capsys, tree)
    assert code == 6 and "pkg/a.py" in out and content(tree) == before


def test_inside_somebody_elses_repository(tmp_path, tree, capsys):
    import subprocess

    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / ".gitattributes").write_text("*.py text eol=crlf\n")
    assert run(capsys, tree)[0] == 0
    assert b"\r" not in (tree / "pkg/a.py").read_bytes()


def test_list_needs_no_checkout(tree, capsys):
    code, out = run(capsys, "--list")
    assert code == 0 and all(slug in out for slug in SLUGS)


@pytest.mark.parametrize("damage, rule", [
    (lambda t: t.replace("Kind: replace", "Kind: other"), "Kind"),
    (lambda t: t.replace("Why: it is wrong\n", ""), "field order"),
    (lambda t: t.replace("Upstream-Status: Pending", "Upstream-Status: soon"), "Upstream-Status"),
    (lambda t: t.replace("Slug: add-new-file", "Slug: other-name"), "Slug"),
    (lambda t: t.replace("\n---\n", "\n"), "separator"),
    (lambda t: t.rstrip("\n"), "diff"),
])
def test_header_rules_name_file_and_line(patches, tmp_path, damage, rule):
    path = tmp_path / "add-new-file.patch"
    path.write_text(damage((patches / "pkg/v1/add-new-file.patch").read_text()))
    with pytest.raises(patchset.PatchError, match=rule) as caught:
        patchset.parse(path)
    assert f"{path}:" in str(caught.value)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(SLUGS), min_size=1)), max_size=6))
def test_any_sequence_keeps_a_known_state(patches, tmp_path_factory, steps):
    """After every step the tree is a recorded state, and the model's set of applied slugs is what --status says."""
    tree = patch_sets.write_tree(tmp_path_factory.mktemp("walk"))
    before = content(tree)
    found_set = patchset.load(patches / "pkg/v1")
    model: set[str] = set()
    for reverse, slugs in steps:
        found = patchset.survey(found_set, tree)
        try:
            apply.change(found, tree, sorted(slugs), reverse=reverse, check=False)
            model = model - slugs if reverse else model | slugs
        except patchset.PatchError as error:
            assert error.code == 5
        found = patchset.survey(found_set, tree)
        assert not found.edited and not found.missing
        assert {slug for slug in SLUGS if found.state(slug) == "applied"} == model
        assert "build-on-that" not in model or "change-last-line" in model
    apply.change(patchset.survey(found_set, tree), tree, SLUGS, reverse=True, check=False)
    assert content(tree) == before
