"""Books of a chain of restarts, written by the hooks on verl's real rollouter, v1 trainer and data loaders."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")
pytest.importorskip("torchdata")

from ci.tests.contract import prompt_owners as owners  # noqa: E402
from ci.tests.contract.test_prompt_sampler_hooks import v1_trainer  # noqa: E402
from ci.tests.contract.test_prompts_in_flight import PROMPTS, rollouter_of, train  # noqa: E402
from ci.tests.contract.test_replaced_groups import rollouter_class  # noqa: E402, F401
from esgrpo import records  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.metrics import trained_rows  # noqa: E402
from esgrpo.hooks.verl.prompts import in_flight  # noqa: E402
from esgrpo.hooks.verl.v1.prompts import drawn_prompts  # noqa: E402
from esgrpo.tools import books  # noqa: E402

STARTS = (1, 2, 1, PROMPTS)  # checkpoints after which a start dies; the last one ends


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ESGRPO_SEGMENT", '{"enable": true}')
    monkeypatch.setattr(records, "_writer", records.Writer(period=0.01))
    for name in (records.ENV_RUN_ID, records.ENV_RESTART):
        monkeypatch.setenv(name, "")
    return tmp_path


def begin(run_dir) -> None:
    os.environ.update(records.begun(str(run_dir), goes_on=True))


def settled(run_dir):
    assert records.flush()
    (found,), torn = books.of_directory(str(run_dir))
    assert not torn
    return found


def fully_async(kind, run_dir) -> None:
    """Four starts; each that dies has begun an update that no checkpoint holds."""
    version = 0
    for checkpoints in STARTS:
        begin(run_dir)
        made = rollouter_of(kind, run_dir / "checkpoints", hooked=True)
        steps = iter(range(version + 1, 10 * PROMPTS))

        def tell(made, samples, steps=steps):
            groups = [in_flight.UID + sample.sample_id for sample in samples]
            trained_rows.begin(groups, next(steps))
            in_flight.trained(made, groups)

        _, saved = asyncio.run(asyncio.wait_for(train(made, run_dir / "checkpoints", version, checkpoints, tell), 60))
        version += len(saved)
        if len(saved) == checkpoints:
            trained_rows.begin([in_flight.UID + next(iter(in_flight.buffer_of(made).open))], version + 1)


@pytest.mark.hook("prompts-in-flight", "prompts-in-flight-are-saved", "prompts-in-flight-are-reissued")
def test_each_prompt_of_a_fully_async_epoch_is_trained_once(rollouter_class, run_dir):  # noqa: F811
    fully_async(rollouter_class, run_dir)
    found = settled(run_dir)
    assert found.balanced, found.problems
    assert found.prompts == {"trained": PROMPTS, "drawn": PROMPTS}
    assert found.epochs == [{"epoch": 0, "prompts": PROMPTS, "trained": PROMPTS}]
    assert [start["missing"] for start in found.starts] == [0] * len(STARTS)
    assert all(start["in_flight"] == start["came_back"] > 0 for start in found.starts[1:])


@pytest.mark.parametrize("kind", ["reissued", "submitted", "batch"])
def test_a_row_that_is_missing_is_noticed(rollouter_class, run_dir, kind):  # noqa: F811
    """Negative control: books that balance whatever happens would balance here, too."""
    fully_async(rollouter_class, run_dir)
    records.flush()
    (file,) = (run_dir / "esgrpo").glob(f"{kind}-*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    found = settled(run_dir)
    if kind == "batch":  # of prompts that nobody gave back: they would be trained again
        assert not found.balanced or found.prompts["trained"] < PROMPTS
    else:
        assert not found.balanced


def v1(run_dir, monkeypatch, lose: int) -> list[list[str]]:
    """Two starts of a v1 trainer: of four prompts two are trained in the checkpoint, one is restored, one re-issued."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    owners.hooked(monkeypatch, PPOTrainer, "_next_train_batch", "v1.prompts.drawn_prompts")
    begin(run_dir)
    trainer = v1_trainer(monkeypatch, "colocate_async", 4)
    drawn_prompts.started(trainer, {})
    first = [str(uid) for uid in trainer._next_train_batch(4)["uid"]]
    trained_rows.begin(first[:2], step=1)
    drawn_prompts.saved(trainer)
    state = trainer.train_dataloader.state_dict()
    trained_rows.begin([str(uid) for uid in trainer._next_train_batch(4)["uid"]], step=2)
    begin(run_dir)
    again = v1_trainer(monkeypatch, "colocate_async", 4)
    again.train_dataloader.load_state_dict(state)
    again.global_steps = 2
    tags = {first[2]: {"is_prompt": True, "status": "finished"}, first[3]: {"is_prompt": True, "status": "running"},
            f"{first[2]}_0_0": {"status": "success"}}
    for uid in first[2:][:lose]:
        del tags[uid]
    drawn_prompts.started(again, tags)
    trained_rows.begin([uid for uid in first[2:] if uid in tags], step=2)
    trained_rows.begin([str(uid) for uid in again._next_train_batch(4)["uid"]], step=3)
    assert records.flush()
    return records.read(str(run_dir), "submitted")


@pytest.mark.hook("v1-drawn-prompts")
def test_books_of_a_v1_trainer(run_dir, monkeypatch):
    rows = v1(run_dir, monkeypatch, lose=0)
    found = settled(run_dir)
    assert found.balanced, found.problems
    assert found.prompts == {"trained": 8, "drawn": 8}
    prompts = {restart: {row["draw"]: row["prompt"] for row in rows if row["restart"] == restart}
               for restart in (0, 1)}
    assert list(prompts[0]) == list(range(1, 9)) and list(prompts[1]) == list(range(5, 9))
    assert all(prompts[0][draw] == key for draw, key in prompts[1].items())  # drawn again, the same ones
    assert max(Counter(prompts[0].values()).values()) == 1


@pytest.mark.parametrize("lose", [1, 2])
def test_what_a_v1_restart_loses_is_noticed(run_dir, monkeypatch, lose):
    v1(run_dir, monkeypatch, lose)
    found = settled(run_dir)
    assert found.problems and found.problems[0].startswith(f"{lose} prompts") and "in flight" in found.problems[0]


def test_what_a_synchronous_step_discards_is_booked(run_dir):
    """Of five groups two are trained, one is filtered, one stays in the buffer, and one is verl's surplus."""
    from types import SimpleNamespace

    begin(run_dir)
    buffer = SimpleNamespace(prompt_global_steps={"train": {"g3": 1}})
    owned.of(buffer, owned.Groups).evicted = {"g2": "filtered"}
    trainer = SimpleNamespace(trainer_mode="sync", replay_buffer=buffer)
    groups = [f"g{number}" for number in range(5)]
    drawn_prompts.record(trainer, {"uid": groups, "raw_prompt": groups})
    for _ in range(2):  # told once
        drawn_prompts.note_surplus(trainer, {"g0", "g1"})
    assert [(row["group"], row["reason"]) for row in records.read(str(run_dir), "evicted")] == [("g4", "surplus")]
    assert owned.of(trainer, owned.Drawn).open == {"g3"}
