"""Draws a `state.Loop` with rich: one frame, for any width from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from esgrpo.errors import plain
from esgrpo.tools import decided, language
from esgrpo.tools.top.state import Loop, Replica

TEXTS = Path(__file__).with_name("texts.toml")
WIDE = 120  # columns from which on two halves stand side by side
GAP = 2
MOVES = 5
BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = {"busy": ("█", "green"), "train": ("█", "green"), "wait": ("░", "red"), "idle": ("░", "red"),
         "sync": ("▒", "yellow"), "validation": ("▞", "magenta"), "checkpoint": ("▤", "cyan"),
         "other": ("▓", "bright_black")}  # told apart without colours, too
UNNAMED_PART = ("▚", "blue")
FULL, FREE, FILL_WIDTH = "█", "·", 20
LEAST_BAR, MOST_BAR, BARS = 12, 24, 6  # columns; a bar takes one of so many parts of the width
CURVE = 8  # newest values in the curve of a signal
UNKNOWN, UNBROKEN = "-", "\u00a0"
MINUTE, HOUR, DAY = 60, 3600, 86400


def said(name: str, **values) -> str:
    return language.texts(TEXTS, name, **values)


def ago(seconds: float) -> str:
    """A time span in its two largest units."""
    seconds = max(0, round(seconds))
    if seconds < MINUTE:
        return f"{seconds} s"
    if seconds < HOUR:
        return f"{seconds // MINUTE} min {seconds % MINUTE} s"
    return f"{seconds // HOUR} h {seconds % HOUR // MINUTE} min" if seconds < DAY else f"{seconds // DAY} d"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant ones, thousands apart by a space."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.{digits}g}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def curve(values: list[float]) -> str:
    """One block a value, between the least and the greatest; nothing for fewer than two."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    step = (high - low) / (len(BLOCKS) - 1)
    return "".join(BLOCKS[round((value - low) / step) if step > 0 else 0] for value in values) if values[1:] else ""


def notes(loop: Loop, problems: Iterable[tuple[str, Mapping]]) -> list[Text]:
    """One line each, for what is odd."""
    found = [said(name, **values) for name, values in problems]
    found += [said("dropped", count=loop.dropped)] if loop.dropped else []
    found += [said("no_devices", why=why) for why in dict.fromkeys(filter(None, loop.no_devices.values()))]
    return [Text(plain(line), style="yellow", overflow="fold") for line in found]


def head(run_dir: str, loop: Loop) -> Text:
    """Which run it is, and whether it goes on."""
    text = Text(overflow="fold")
    text.append(plain(run_dir.rstrip("/").rpartition("/")[2] or run_dir), style="bold")
    trainer = plain(str(loop.facts().get("trainer", "")))
    for part in (plain(loop.run or ""), f"{said('start')} {loop.restart}", trainer):
        text.append(f"  {part}" if part else "")
    if loop.version is not None:
        text.append(f"  {said('weights')} {loop.version}", style="bold")
    return text


def life(loop: Loop, now: float, alive: bool | None) -> Text:
    when = ago(now - loop.last)
    line = said("ended", ago=when) if alive is False else said("alive", ago=when)
    return Text(line, style="yellow" if alive is False else "dim", overflow="fold")


def _titled(name: str, table: Table, **values) -> Group:
    """A table's own title would be as narrow as the table."""
    return Group(Text(said(name, **values), style="bold cyan"), table)


def _grid() -> Table:
    grid = Table(box=None, show_header=False, padding=(0, GAP, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _of_devices(devices: Mapping[str, list[float]]) -> str:
    """Shares of the time busy, and of memory in use."""
    return " ".join("/".join(map(percent, shares)) for _, shares in sorted(devices.items())) or UNKNOWN


def replicas(loop: Loop) -> Group | None:
    found = loop.replicas()
    if not found:
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    has_devices = any(one.devices for one in found)
    for name in ("replica", "rate", "running", "surprisal", "lost", "kept", *(["device"] if has_devices else [])):
        table.add_column(said(name), justify="left" if name == "replica" else "right", no_wrap=True)
    for one in found:
        table.add_row(*_cells(one), *([_of_devices(one.devices)] if has_devices else []))
    if len(found) > 1:
        table.add_row(said("all"), number(sum(one.rate for one in found)),
                      f"{sum(one.running for one in found):.1f}", curve(loop.rates()), style="bold")
    return _titled("replicas", table, version=max(one.version for one in found))


def _cells(one: Replica) -> list[str]:
    lost = "/".join(percent(one.share(cause)) for cause in ("idle", "tail", "sync"))
    return [plain(one.name) or UNKNOWN, number(one.rate), f"{one.running:.1f}/{one.capacity}", number(one.surprise),
            lost, f"{one.kept}/{one.aborted}"]


def loop_table(loop: Loop) -> Group | None:
    """Trigger, queue, age, signals; None before there is any."""
    grid = _grid()
    trained, rolled = loop.newest("train"), loop.newest("rollout")
    if trained is not None:
        grid.add_row(said("trigger"), said("trigger_groups", groups=number(trained.groups),
                                           times=len(loop.of_version("train"))))
    took = loop.seconds("rollout") or loop.seconds("train")
    if took is not None:
        grid.add_row(said("seconds"), f"{took:.1f} s")
    if rolled is not None:
        grid.add_row(said("queue"), _fill(rolled.queue, rolled.queue_limit))
        grid.add_row(said("in_flight"), _fill(rolled.in_flight, rolled.limit))
    elif loop.prompts_waiting:
        grid.add_row(said("queue"), said("waiting", count=loop.prompts_waiting))
    if trained is not None and trained.age is not None:
        queued = UNKNOWN if trained.queued_s is None else f"{trained.queued_s:.1f} s"
        grid.add_row(said("age"), said("age_of", versions=number(trained.age), seconds=queued))
    theirs = loop.trainer_devices()
    if theirs:
        grid.add_row(said("trainer_device"), _of_devices(theirs))
    if loop.ended:
        grid.add_row(said("since"), said("since_of", count=loop.ended, tokens=number(loop.ended_tokens)))
    if loop.checkpoint:
        grid.add_row(said("checkpoint"), str(loop.checkpoint))
    signals = [f"{name} {number(values[-1])} {curve(values[-CURVE:])}".rstrip().replace(" ", UNBROKEN)
               for name, values in loop.signals().items()]
    if signals:
        grid.add_row(said("signals"), Text("   ".join(signals)))
    return _titled("loop", grid) if grid.row_count else None


def _fill(value: float | None, limit: int | None) -> Text:
    if value is None or not limit:
        return Text(number(value))
    part = max(0, min(FILL_WIDTH, round(FILL_WIDTH * value / limit)))
    return Text.assemble((FULL * part, "green"), (FREE * (FILL_WIDTH - part), "bright_black"),
                         f" {number(value)} / {limit}")


def times(loop: Loop, width: int) -> Group | None:
    """A bar a side: of the newest version, and of the recent ones."""
    sides = [side for side in ("train", "rollout") if loop.newest(side)]
    if not sides:
        return None
    grid = _grid()
    for side in sides:
        for recent in (False, True):
            shares = loop.spent(side, recent)
            # without those of nothing: beside the other column there is no room for six
            legend = "  ".join(f"{_part(name)} {percent(share)}" for name, share in shares.items()
                               if percent(share) != percent(0))
            grid.add_row("" if recent else said(side), _bar(shares, width), Text(legend, no_wrap=True))
    return _titled("spent", grid, count=max(map(loop.versions, sides)))


def _part(name: str) -> str:
    return said(f"part_{name}") if name in PARTS else plain(name)


def _bar(shares: Mapping[str, float], width: int) -> Text:
    text, drawn, upto = Text(no_wrap=True), 0, 0.0
    for name, share in shares.items():
        upto += share
        end = round(width * upto)
        block, style = PARTS.get(name, UNNAMED_PART)
        text.append(block * (end - drawn), style=style)
        drawn = end
    return text


def modules(loop: Loop) -> Group | None:
    rows = decided.of_rows(loop.decided())
    if not rows:
        return None
    grid = _grid()
    for row in rows:
        if row.on:
            grid.add_row(row.module, plain(str(row.decided) if row.decided else row.reason))
    off = [row.module for row in rows if not row.on]
    if off:
        grid.add_row(said("module_off"), Text(", ".join(off), style="dim"))
    return _titled("modules", grid)


def moves(loop: Loop) -> Group | None:
    """None for a run that no controller has moved."""
    if not loop.moves:
        return None
    grid = _grid()
    for move in list(loop.moves)[-MOVES:]:
        settings = {name: (move.before.get(name), value) for name, value in move.after.items()}
        changed = [f"{name} {_setting(old)} → {_setting(new)}" for name, (old, new) in {**settings, **move.also}.items()
                   if old != new]
        grid.add_row(str(move.version), plain(f"{move.cause}: {', '.join(changed) or said('no_moves')}"))
    return _titled("moves", grid)


def _setting(value) -> str:
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def frame(run_dir: str, loop: Loop, now: float, alive: bool | None, problems: Iterable[tuple[str, Mapping]],
          width: int, waits: bool) -> RenderableType:
    """The whole frame. `alive`: whether a process of the run is left, None where that cannot be known; `waits`: there
    will be another frame."""
    if loop.last is None:
        return Group(*notes(loop, [("waits" if waits else "no_rows", {"folder": run_dir}), *problems]))
    top = [head(run_dir, loop), life(loop, now, alive), *notes(loop, problems)]
    if loop.version is None:
        top.append(Text(said("begun"), overflow="fold"))
    half = (width - GAP) // 2 if width >= WIDE else width
    left = [part for part in (replicas(loop), times(loop, max(LEAST_BAR, min(MOST_BAR, half // BARS)))) if part]
    right = [part for part in (loop_table(loop), moves(loop), modules(loop)) if part]  # what is last is cropped first
    if width < WIDE:
        return Group(*top, *left[:1], *right[:1], *left[1:], *right[1:])
    sides = Table.grid(padding=(0, GAP, 0, 0))
    sides.add_column(width=half)
    sides.add_column(width=half)
    sides.add_row(Group(*left), Group(*right))
    return Group(*top, sides)


def fitted(console: Console, whole: RenderableType) -> RenderableType:
    """As much of a frame as the terminal has lines for; where that is not all, its last line says so."""
    lines = console.render_lines(whole, pad=False)
    room = console.height - 1
    if len(lines) <= console.height:
        return whole
    shown = Segments(part for line in lines[:room] for part in (*line, Segment.line()))
    return Group(shown, Text(said("more_lines", count=len(lines) - room), style="yellow"))
