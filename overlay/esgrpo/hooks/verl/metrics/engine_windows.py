"""Engine windows that weight syncs closed, where the metrics of the trainer are: counted, recorded, as metrics."""

from __future__ import annotations

from collections.abc import Sequence


def told(windows: Sequence[dict], paused: float = 0.0) -> dict[str, float]:
    """Metrics of the windows closed since the last call, without those of weight syncs where none was closed.

    `paused`: seconds in which no prompt was begun because verl held them back.
    """
    from esgrpo import records
    from esgrpo.algo.accounting import bubble, replica_rates, sync_counts
    from esgrpo.algo.rows import EngineWindow
    from esgrpo.hooks.verl.metrics import decision_counts

    decision_counts.add_windows(windows)
    for window in windows:
        records.write_told(EngineWindow, {**window, "rollouter_paused": paused})
    found = {f"esgrpo/{'' if name == 'bubble_rate' else 'bubble/'}{name}": rate
             for name, rate in bubble(windows, paused).items()}
    syncs = sync_counts(windows) if windows else {}
    return {**found, **{f"esgrpo/sync/{name}": value for name, value in syncs.items()},
            **{f"esgrpo/replicas/{name}": value for name, value in replica_rates(windows).items()}}
