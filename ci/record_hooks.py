"""Writes hooks/fingerprints/UPSTREAM.toml: which source of an upstream each hook was tested with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from esgrpo import recorded  # noqa: E402

HEADER = "# Written by `python -m ci.record_hooks`; what it means is said in esgrpo/recorded.py.\n"
WIDTH = 120


def text_of(upstream: recorded.Upstream) -> str:
    """The file's content: hooks sorted by slug, fingerprints by the oldest release that has them."""
    lines = [HEADER, f"{recorded.SUPPORTED} = {_list(upstream.supported)}\n"]
    for slug in sorted(upstream.hooks):
        entry = upstream.hooks[slug]
        lines += [f"\n[{slug}]\n", *_rows("", entry.fingerprints), *_rows(f"{recorded.CURED}.", entry.cured)]
    return "".join(lines)


def _rows(prefix: str, by_release: dict[str, str]) -> list[str]:
    releases: dict[str, list[str]] = {}
    for release in sorted(by_release, key=recorded.order_of):
        releases.setdefault(by_release[release], []).append(release)
    rows = []
    for fingerprint, having in releases.items():
        row = f"{prefix}{fingerprint} = {_list(having)}"
        rows.append((row if len(row) <= WIDTH else f"{prefix}{fingerprint} = {_list(having, ',' + chr(10) + '    ')}")
                    + "\n")
    return rows


def _list(words, comma: str = ", ") -> str:
    return f"[{comma.join(f'{chr(34)}{word}{chr(34)}' for word in words)}]"
