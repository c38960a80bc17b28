"""What pruning did between two weight versions: from the rollouter, which sees replaced groups as well, or under v1."""

from __future__ import annotations

PREFIX = "esgrpo/"


def note(owner, rows: list[dict], replaced: bool) -> None:
    """Remember the rows of one group until the next weight version; `owner` is the rollouter, or v1's buffer."""
    from esgrpo.algo.accounting import token_balance
    from esgrpo.algo.terms import Outcome
    from esgrpo.hooks.verl import owned

    noted = owned.of(owner, owned.Pruned)
    noted.groups += 1
    noted.rows += rows
    if replaced:
        noted.replaced += 1
        noted.tokens += token_balance([{**row, "pruned": row["outcome"] == Outcome.PRUNE, "trained": False,
                                        "replaced": True} for row in rows])["zero_variance"]


def take(owner, trained: list[dict] | None = None) -> dict[str, float]:
    """Metrics since the last call; none when pruning is off. `trained`: rows of groups that nobody has noted (v1)."""
    from esgrpo.hooks.verl import owned

    noted = owned.take(owner, owned.Pruned)
    if not noted.groups and trained is None:
        return {}
    return {f"{PREFIX}prune/replaced_groups": noted.replaced,
            # beside the trainer's esgrpo/waste/zero_variance, which never sees these groups
            f"{PREFIX}waste/zero_variance_replaced": noted.tokens,
            **of([*noted.rows, *(trained or ())])}


def of(rows: list[dict]) -> dict[str, float]:
    """Report of the audit and length bias of every rule, from summaries of whole groups."""
    from esgrpo.algo.pruned_rows import length_bias, prune_report

    return {**{f"{PREFIX}prune/{name}": value for name, value in prune_report(rows).items()},
            **{f"{PREFIX}length_bias/{rule}": value for rule, value in length_bias(rows).items()}}
