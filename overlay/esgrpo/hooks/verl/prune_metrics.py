"""What pruning did between two weight versions, gathered in the rollouter, which sees replaced groups as well."""

from __future__ import annotations

PREFIX = "esgrpo/"


def note(rollouter, rows: list[dict], replaced: bool) -> None:
    """Remember the rows of one group until the next weight version."""
    noted = rollouter.__dict__.setdefault("esgrpo_noted", {"rows": [], "replaced": 0})
    noted["rows"] += rows
    noted["replaced"] += replaced


def take(rollouter) -> dict[str, float]:
    """Metrics since the last call; none when pruning is off."""
    from esgrpo.algo.accounting import length_bias, prune_report

    noted = rollouter.__dict__.pop("esgrpo_noted", None)
    if noted is None:
        return {}
    return {f"{PREFIX}prune/replaced_groups": noted["replaced"],
            **{f"{PREFIX}prune/{name}": value for name, value in prune_report(noted["rows"]).items()},
            **{f"{PREFIX}length_bias/{rule}": value for rule, value in length_bias(noted["rows"]).items()}}
