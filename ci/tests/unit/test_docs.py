"""The README's config table is generated from the dataclasses and must not be stale."""

from __future__ import annotations

from bench import docs


def test_readmes_are_up_to_date():
    assert docs.main(["--check"]) == 0


def test_fill_replaces_only_its_block():
    text = "a <!-- t -->old<!-- /t --> b <!-- u -->"
    assert docs.fill(text, "t", "new") == "a <!-- t -->\nnew\n<!-- /t --> b <!-- u -->"
    assert docs.fill(docs.fill("<!-- u -->", "u", "1"), "u", "2") == "<!-- u -->\n2\n<!-- /u -->"
