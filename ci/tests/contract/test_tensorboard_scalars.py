"""The overlay's metrics as TensorBoard scalars, through verl's own Tracking (trainer.logger=[tensorboard])."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from esgrpo import config
from esgrpo.call import wrapped
from esgrpo.hooks.verl.metrics import metric_prefix, trained_rows

pytest.importorskip("verl")
pytest.importorskip("tensorboard")

LOSS = {"esgrpo/pois/log_kl_rollout_current": [0.25, 0.75], "pg_loss": [1.0, 3.0]}  # of two micro-batches
SUMMARY = {"group": "g", "member": 0, "outcome": "finish", "rule": "", "tokens": 3, "attempts": 2, "reprefill": 4,
           "boundaries": 2, "spans": [[0, 1], [1, 2]], "started": 10.0, "ended": 12.0}


def batch_of(summaries):
    fields = np.empty(len(summaries), dtype=object)
    fields[:] = summaries
    return SimpleNamespace(non_tensor_batch={"esgrpo": fields}, batch={
        "response_mask": torch.ones(len(summaries), 3), "advantages": torch.ones(len(summaries), 3),
        "token_level_scores": torch.ones(len(summaries), 3)})


def metrics_of_a_step(prefix, batch_metrics) -> dict[str, float]:
    """In verl's order: the loss's metrics get a prefix and are reduced, those of the batch are added."""
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    original = getattr(rename_dict, "__wrapped__", rename_dict)  # the overlay may be active in this environment
    of_batch = batch_metrics(lambda batch: {"critic/score/mean": 1.0})
    ours = of_batch(batch_of([SUMMARY, {**SUMMARY, "member": 1}]))
    return {**reduce_metrics(prefix(original)(LOSS, "actor/")), **ours}


def logged(directory, monkeypatch, metrics: dict[str, float]) -> dict[str, tuple[int, float]]:
    """Tag -> (step, value), as TensorBoard reads them from the event file that verl wrote."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(directory))
    tracking = Tracking("project", "experiment", default_backend=["tensorboard"], config={})
    tracking.log(data=metrics, step=7)
    tracking.finish()
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: (found.step, found.value) for tag in events.Tags()["scalars"] for found in events.Scalars(tag)}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv(config.ENV_FACTS, '{"devices": 2, "optimizer_steps_per_version": 1}')
    monkeypatch.delenv(config.ENV_SEGMENT, raising=False)
    monkeypatch.delenv(config.ENV_FEATURES, raising=False)
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)


@pytest.mark.hook("metrics-keep-prefix", "trained-rows")
def test_every_metric_is_a_scalar_under_its_own_name(tmp_path, monkeypatch):
    metrics = metrics_of_a_step(*(partial(wrapped, code) for code in (metric_prefix, trained_rows)))
    ours = {name for name in metrics if "esgrpo/" in name}
    assert {"esgrpo/pois/log_kl_rollout_current", "esgrpo/waste/reprefill", "esgrpo/tail_ratio"} <= ours
    found = logged(tmp_path, monkeypatch, metrics)
    assert found["esgrpo/pois/log_kl_rollout_current"] == (7, 0.5) and found["esgrpo/waste/reprefill"] == (7, 8.0)
    assert {tag for tag in found if "esgrpo/" in tag} == ours and all(tag.startswith("esgrpo/") for tag in ours)
    assert found["actor/pg_loss"] == (7, 2.0)  # verl's own keep their prefix


def test_plain_verl_has_no_such_scalars(tmp_path, monkeypatch):
    """Control: without the hooks the loss's metric hides under actor/, and those of the batch do not exist."""
    found = logged(tmp_path, monkeypatch, metrics_of_a_step(lambda original: original, lambda original: original))
    assert {tag for tag in found if "esgrpo" in tag} == {"actor/esgrpo/pois/log_kl_rollout_current"}
