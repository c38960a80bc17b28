"""The page's own words in Chinese; what records say about themselves stays as it was recorded.

Whole texts first, then phrases inside of a text, the longest first: a cell of the first table is put together from
such phrases and from names.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXTS = Path(__file__).with_name("chinese.toml")


@functools.cache
def _known() -> tuple[dict[str, str], list[tuple[str, str]]]:
    found = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    return found["texts"], sorted(found["phrases"].items(), key=lambda pair: -len(pair[0]))


def in_chinese(text: str) -> str:
    """The text itself where nothing of it is known."""
    texts, phrases = _known()
    if text in texts:
        return texts[text]
    for english, chinese in phrases:
        text = text.replace(english, chinese)
    return text
