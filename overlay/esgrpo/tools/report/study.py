"""The simulator's study: what each module brings, how gains move with load and size, and where there are none."""

from __future__ import annotations

from esgrpo.tools.report import plots
from esgrpo.tools.report.load import Record
from esgrpo.tools.report.plots import Figure
from esgrpo.tools.report.tables import DASH, Table, number

PANELS = 3
ROW_HEAD = ["policy", "setting", "ratios to", "updates/s, ratio", "used tokens/s, ratio",
            "groups with gradient/s, ratio", "versions old, mean (max)", "stale rows", "decisions a run", "bubble rate",
            "P99, s"]
DODGE = 0.12  # between policies at the same setting


def modules_of(record: Record) -> dict[str, dict[str, dict]]:
    """Place -> module letter -> what leaving it out loses."""
    return {place: {key: row for key, row in rows.items() if isinstance(row, dict) and "brings" in row}
            for place, rows in record.data.get("modules", {}).items()}


def ratio(found: dict) -> str:
    return f"{number(found['mean'])} [{number(found['low'])}, {number(found['high'])}]"


def against(row: dict) -> str:
    """The policy that an arm's ratios are to; the word is missing in a study that had one baseline."""
    return row.get("against", "verl")


def setting_text(setting: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items()) or "base"


def _stale(found: dict | None) -> str:
    """Versions between the begin of a trained group and its update; a study may not have counted them."""
    return f"{number(found['mean'])} ({found['max']})" if found else ""


def _row(row: dict) -> list[str]:
    rows = row.get("staleness", {}).get("rows")
    decided = ", ".join(f"{module} {number(count)}" for module, count in row.get("decisions", {}).items() if count)
    return [row["policy"], setting_text(row["setting"]), against(row), ratio(row["updates"]), ratio(row["used"]),
            ratio(row["gradient"]), _stale(row.get("staleness")), f"{rows['share']:.0%}" if rows else DASH,
            decided or ("none" if "decisions" in row else DASH), number(row["bubble"]["bubble_rate"]),
            number(row["p99_s"])]


def study(record: Record) -> list[Table]:
    """Ranking of the modules, settings without a gain, then every arm of every part."""
    data, rows = record.data, []
    for place, found in modules_of(record).items():
        whole = data["modules"][place]["whole"]
        for module, row in found.items():
            rows.append([place, f"{module} {row['name']}", row["rank"], f"{row['brings']:+.3f}",
                         f"{row['brings_updates']:+.3f}",
                         *(ratio(arm["gradient"]) for arm in (whole, row["without"], row["alone"]))])
    head = ["place", "module", "rank", "brings", "brings, updates/s", "all modules", "without it", "alone"]
    limits = ", ".join(f"{name} from {value}" if isinstance(value, float) else str(value)
                       for name, value in data["ranks"].items())
    title = f"What each module brings, groups with gradient/s as a ratio to verl's best ({limits})"
    tables = [Table(title, [head, *rows])] if rows else []
    helpless = [[setting_text(one["setting"]), ratio(one["updates"])] for one in data.get("where_it_does_not_help", [])]
    tables.append(Table("Where ES-GRPO does not help", [["setting", "updates/s, ratio to verl's best"],
                                                       *(helpless or [["none of the settings tried", ""]])]))
    tables += [Table(f"Variants: {place}", [ROW_HEAD, *map(_row, rows["changes"])], folded=True)
               for place, rows in data.get("modules", {}).items() if rows.get("changes")]
    return tables + [Table(f"{part.capitalize()}: {title}", [ROW_HEAD, *map(_row, found)], folded=part == "sweeps")
                     for part, groups in data.items() if isinstance(groups, dict)
                     for title, found in groups.items() if isinstance(found, list) and _are_arms(found)]


def _are_arms(found: list) -> bool:
    return bool(found) and all(isinstance(row, dict) and "updates" in row and "policy" in row for row in found)


def figures(record: Record) -> list[Figure]:
    return [figure for figure in (_modules(record), _scaling(record)) if figure]


def _modules(record: Record) -> Figure | None:
    places = modules_of(record)
    if not places:
        return None
    names = {module: f"{module} {row['name']}" for rows in places.values() for module, row in rows.items()}
    height = plots.HEAD_IN + plots.ROW_IN * 2 * len(names)
    with plots.drawing(height=height) as (axes, done):
        axis = axes[0]
        width = 0.8 / len(places)
        for number_, ((place, rows), colour) in enumerate(zip(places.items(), plots.ARM_COLOURS[1:] * 2, strict=False)):
            axis.barh([line + (number_ + 0.5) * width - 0.4 for line in range(len(rows))],
                      [row["brings"] for row in rows.values()], height=width * 0.9, color=colour, label=place)
        axis.axvline(0, color="#4b4f58", lw=0.8)
        axis.set(yticks=range(len(names)), yticklabels=names.values(), ylim=(len(names) - 0.4, -0.6),
                 xlabel=record.data["ranks"]["of"])
        axis.grid(axis="x")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.stamp(axis, True)
        return Figure("What each module brings", "Simulated, mean over seeds. Left of zero a module harms.", done())


def _label(setting: dict) -> str:
    told = {key: value for key, value in setting.items() if key != "scenario"}
    return "\n".join(f"{value:,}" if isinstance(value, int) else str(value) for value in told.values())


def _scaling(record: Record) -> Figure | None:
    sweeps = record.data.get("sweeps", {})
    if not sweeps:
        return None
    lines = list(dict.fromkeys(f"{row['setting'].get('scenario', '')} {row['policy']}" for rows in sweeps.values()
                               for row in rows))
    palette = dict(zip(lines, plots.ARM_COLOURS[1:] * 3, strict=False))
    rows = -(-len(sweeps) // PANELS)
    with plots.drawing(rows, PANELS, 0.6 + 1.8 * rows, sharey=True) as (axes, done):
        for axis, (title, found) in zip(axes, sweeps.items(), strict=False):
            labels = list(dict.fromkeys(_label(row["setting"]) for row in found))
            for place, name in enumerate(lines):
                mine = [row for row in found if f"{row['setting'].get('scenario', '')} {row['policy']}" == name]
                if mine:
                    at = [labels.index(_label(row["setting"])) + (place - len(lines) / 2) * DODGE for row in mine]
                    middle = [row["updates"]["mean"] for row in mine]
                    error = [[row["updates"]["mean"] - row["updates"]["low"] for row in mine],
                             [row["updates"]["high"] - row["updates"]["mean"] for row in mine]]
                    axis.errorbar(at, middle, error, fmt="o-", ms=3, lw=1, elinewidth=0.8, color=palette[name],
                                  label=name)
            axis.axhline(1, color="#4b4f58", lw=0.8, ls=(0, (3, 3)))
            axis.set(xticks=range(len(labels)), xticklabels=labels, title=title)
            axis.grid(axis="y")
        for axis in axes[len(sweeps):]:
            axis.set_visible(False)
        figure = axes[0].figure
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(),
                                                                           strict=True)}
        figure.legend(handles.values(), handles.keys(), ncols=4, loc="outside upper left")
        plots.outer_labels(figure, "setting of the panel", "updates/s, ratio to verl's best")
        plots.stamp(axes[0], True)
        return Figure("Scaling: how the gain moves with load, size and memory",
                      "Simulated. Mean over seeds with the lowest and highest; below the dashed line verl is faster.",
                      done())
