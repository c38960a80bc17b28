"""The documents: what is generated is fresh, every link and anchor leads somewhere, the front page stays one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import docs, gains

ROOT = docs.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("overlay/README.md")])
FRONT_PAGE_LINES = 150
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python -m (bench\.[\w.]+|esgrpo[\w.]*|ci\.[\w.]+)")


def prose(text: str) -> str:
    """Without fenced blocks and code spans, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```$", "", text))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for title in re.findall(r"(?m)^#+ (.+)$", text):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        number = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(page: Path) -> list[str]:
    """Links of a page to files or anchors that are not there."""
    wrong = []
    for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):  # another host: nobody is asked
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            wrong.append(target)
    return wrong


def test_what_is_generated_is_up_to_date():
    assert docs.main(["--check"]) == 0


@pytest.mark.parametrize("end", ["", "_zh"])
def test_the_front_page_shows_the_run_whose_table_is_in_the_results(end):
    """Decisions of the demo, and the states of its hooks."""
    front = (ROOT / f"README{end}.md").read_text(encoding="utf-8")
    table = (ROOT / "docs" / f"results{end}.md").read_text(encoding="utf-8").partition("<!-- quickstart-table -->")[2]
    rows = dict(re.findall(r"(?m)^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", table))
    shown = re.search(r"(?ms)^MODULE +SWITCH +DECISIONS +REASON\n(.*?)^```$", front)[1].splitlines()
    assert len(shown) > 3
    for line in shown:
        module, switch, decided, *reason = line.split(maxsplit=3)
        assert switch == "on" and rows[f"decisions: {module}"] == ": ".join([decided, *reason])
    assert rows["hook states"] == re.search(r"handshake: \d+ processes, (.+)", front)[1]


def test_every_block_has_its_place():
    for page, name in docs.BLOCKS:
        text = page.read_text(encoding="utf-8")
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1, (page.name, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# There it is!\n```\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#there-it-is) [2](b.md#no-heading) [3](c.md) [4](https://x.y/z) `[5](d.md)` [6](#here)\n"
                    "## Here\n")
    assert broken(page) == ["b.md#no-heading", "c.md"]


@pytest.mark.parametrize("name", ["README.md", "README_zh.md"])
def test_the_front_page_stays_one_page(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= FRONT_PAGE_LINES


def test_pages_have_a_chinese_twin_with_as_many_sections():
    english = [page for page in sorted((ROOT / "docs").glob("*.md")) if (page.with_name(f"{page.stem}_zh.md")).exists()]
    assert {page.stem for page in english} >= {"reference", "results", "limits", "compatibility", "faq"}
    for page in [ROOT / "README.md", *english]:
        twin = page.with_name(f"{page.stem}_zh.md")
        assert len(anchors(page)) == len(anchors(twin)), page.name


def test_commands_that_documents_name_exist():
    missing = set()
    for page in PAGES:
        for module in COMMAND.findall(page.read_text(encoding="utf-8")):
            parts = module.rstrip(".").split(".")
            place = (ROOT / "overlay" if parts[0] == "esgrpo" else ROOT).joinpath(*parts)
            if not (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
                missing.add(module)
    assert missing == set()


def test_records_that_the_table_of_comparisons_names_exist():
    for row in gains.table(gains.ENGLISH)[1:]:
        named = re.findall(r"\(([^)]*bench/results/[^)]*)\)", row[-1])
        assert named and all((docs.DOCS / name).exists() for name in named), named


def test_every_setting_is_said_in_chinese():
    english, chinese = docs.config_rows(docs.ENGLISH), docs.config_rows(docs.CHINESE)
    assert [row[0] for row in english] == [row[0] for row in chinese]
    assert all(re.search(r"[\u4e00-\u9fff]", row[-1]) for row in chinese)


def test_a_bound_that_is_not_allowed_is_not_among_what_is():
    allowed = {row[0].strip("`"): row[2] for row in docs.config_rows(docs.ENGLISH)}
    assert allowed["overlap.age_scale"] == "> 0.0 … ∞" and allowed["kv_headroom"] == "0.0 … 0.9"


def test_fill_replaces_only_its_block():
    text = "a <!-- t -->old<!-- /t --> b <!-- u -->"
    assert docs.fill(text, "t", "new") == "a <!-- t -->\nnew\n<!-- /t --> b <!-- u -->"
    assert docs.fill(docs.fill("<!-- u -->", "u", "1"), "u", "2") == "<!-- u -->\n2\n<!-- /u -->"
