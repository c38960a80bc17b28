"""The prompt sampler in verl's own data loaders: when prompts are drawn, how many, and what a restart remembers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ci.tests.contract import prompt_owners as owners
from esgrpo.call import wrapped
from esgrpo.hooks.verl import owned

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

PROMPTS, LOOKAHEAD, TOTAL = 12, 3, 40


@pytest.fixture
def prepared(monkeypatch):
    owners.provide_history(monkeypatch)
    owners.switched_on(monkeypatch, sampler={"enable": True})
    return monkeypatch


def rollouter(patch, hook: bool = True, total: int = TOTAL, **data):
    """verl's real rollouter class with its real data loader; of its __init__ only what makes that."""
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    from esgrpo.hooks.verl.prompts import prompt_sampler

    def initialise(self):
        dataset = owners.Prompts(PROMPTS)
        self._create_dataloader(dataset, owners.Prompts(1), collate_fn, create_rl_sampler(config.data, dataset))

    config = owners.settings()
    config.data.update(data)
    one = owners.bare(owners.modified(FullyAsyncRollouter), config=config, global_steps=1, total_rollout_steps=total,
                      required_samples=2, dataloader_lock=asyncio.Lock())
    (wrapped(prompt_sampler, initialise) if hook else initialise)(one)
    return one


def chosen(one, count: int) -> list[int]:
    iterator = one._create_continuous_iterator()
    return [int(next(iterator)[1]["number"][0]) for _ in range(count)]


async def fed(one, size: int, after=lambda number: None) -> tuple[list, int]:
    """Run the real _feed_samples against a bounded queue; what was delivered, and how far the draws were ahead."""
    one.pending_queue, delivered, ahead = asyncio.Queue(maxsize=size), [], 0
    task = asyncio.create_task(one._feed_samples())
    while True:
        for _ in range(5):
            await asyncio.sleep(0)
        sample = await one.pending_queue.get()
        if sample is None:
            break
        number = int(sample.full_batch.non_tensor_batch["number"][0])
        delivered.append((sample.epoch, sample.sample_id, number, len(sample.full_batch)))
        after(number)
        for _ in range(5):
            await asyncio.sleep(0)
        order = owned.of(one, owned.Prompts).order
        drawn = order.prompts.taken if order is not None else 0
        ahead = max(ahead, drawn - len(delivered))
    await task
    return delivered, ahead


@pytest.mark.hook("prompt-sampler")
def test_prompts_are_drawn_no_earlier_than_the_queue_takes_them(prepared):
    one = rollouter(prepared)
    delivered, ahead = asyncio.run(fed(one, LOOKAHEAD))
    assert len(delivered) == TOTAL == len({sample_id for _, sample_id, _, _ in delivered})
    assert ahead == LOOKAHEAD + 1  # what waits in the queue and what waits for room in it
    assert [epoch for epoch, *_ in delivered] == sorted(epoch for epoch, *_ in delivered)
    assert all(rows == owners.RESPONSES for *_, rows in delivered)


def test_workers_would_draw_ahead(prepared):
    """Negative control of the test above, and why the data loader gets no workers."""
    one = rollouter(prepared, dataloader_num_workers=2)
    chosen(one, 1)
    assert one.train_dataloader.num_workers == 0 and owned.of(one, owned.Prompts).order.prompts.taken == 1
    with_workers = type(one.train_dataloader)(
        dataset=one.train_dataloader.dataset, batch_size=1, num_workers=2, sampler=one.train_dataloader.sampler,
        collate_fn=one.train_dataloader.collate_fn)
    next(iter(with_workers))
    assert owned.of(one, owned.Prompts).order.prompts.taken > 2


def test_plain_verl_takes_every_prompt_once_an_epoch(prepared):
    plain = rollouter(prepared, hook=False)
    assert sorted(chosen(plain, PROMPTS)) == list(range(PROMPTS))
    one = rollouter(prepared)
    owners.solved(owners.history_of(one), range(0, PROMPTS, 2))
    owners.mixed(owners.history_of(one), range(1, PROMPTS, 2))
    counts = Counter(chosen(one, 10 * PROMPTS))
    useful = sum(counts[number] for number in range(1, PROMPTS, 2))
    assert 0.6 < useful / (10 * PROMPTS) < 1.0  # the others are still drawn


def test_what_is_learned_during_the_run_changes_the_choice(prepared):
    """Outcomes come back through the history while prompts are drawn: its observe is the only way in."""
    from esgrpo.hooks.verl.prompts import prompt_order
    one = rollouter(prepared, total=400)

    def after(number: int) -> None:
        (owners.solved if number % 2 else owners.mixed)(owners.history_of(one), [number])

    delivered, _ = asyncio.run(fed(one, 1, after))
    early, late = ([number % 2 for *_, number, _ in part] for part in (delivered[:PROMPTS], delivered[-200:]))
    assert sum(late) / len(late) < 0.4 < sum(early) / len(early) + 0.2
    found = prompt_order.metrics_of(one)
    assert set(found) == {f"esgrpo/sampler/{name}" for name in (
        "unseen", "coverage", "entropy", "expected_gradient", "realised_gradient")}
    assert abs(found["esgrpo/sampler/expected_gradient"] - found["esgrpo/sampler/realised_gradient"]) < 0.35


def test_a_restart_goes_on_where_the_checkpoint_was(prepared, tmp_path):
    folder = tmp_path / "global_step_3"
    one = rollouter(prepared)
    one.config.trainer.default_local_dir = str(tmp_path)
    iterator = one._create_continuous_iterator()
    before = [int(next(iterator)[1]["number"][0]) for _ in range(17)]
    asyncio.run(one.save_checkpoint(str(folder)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    expected = [int(next(iterator)[1]["number"][0]) for _ in range(15)]

    def resumed(load: bool) -> list[int]:
        other = rollouter(prepared)
        other.config.trainer.default_local_dir = str(tmp_path)
        if load:
            other.load_checkpoint()
            assert other.global_steps == 3 * other.required_samples + 1
        found = chosen(other, 15)
        assert not load or not set(before[-PROMPTS // 4:]) & set(found[:1])  # what was taken last still rests
        return found

    assert resumed(load=True) == expected
    assert resumed(load=False) != expected


def test_a_checkpoint_goes_on_with_the_sampler_switched_on_or_off(prepared, tmp_path, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    for writer, reader in ((False, True), (True, False)):
        one = rollouter(prepared, hook=writer)
        chosen(one, 5)
        asyncio.run(one.save_checkpoint(str(tmp_path / "global_step_1")))
        other = rollouter(prepared, hook=reader)
        other.config.trainer.default_local_dir = str(tmp_path)
        other.load_checkpoint()
        found = chosen(other, PROMPTS - 5)
        assert reader or len(set(found)) == PROMPTS - 5  # verl goes on with the rest of its epoch
        line = capsys.readouterr().err
        assert ("prompt-sampler" in line and line.count(" | ") == 3) if reader else not line


def test_a_hook_on_the_inherited_method_would_be_lost(prepared):
    """Why the hook is on __init__: Ray copies inherited methods into the class that it ships by value."""
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    prepared.setattr(RayPPOTrainer, "_create_dataloader", lambda self, *args, **kwargs: None)
    shipped = owners.modified(FullyAsyncRollouter)
    assert issubclass(shipped, RayPPOTrainer)
    assert shipped._create_dataloader is not RayPPOTrainer._create_dataloader


def v1_trainer(patch, mode: str, batch_size: int, **attributes):
    """verl's real v1 trainer class with its real data loader."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    dataset = owners.Prompts(PROMPTS)
    patch.setattr(trainer_base, "create_rl_dataset", lambda *args, is_train, **more: dataset if is_train
                  else owners.Prompts(1))
    config = owners.settings()
    config.data.update(train_batch_size=batch_size, gen_batch_size=None, dataloader_num_workers=2)
    trainer = owners.bare(PPOTrainerSync, config=config, tokenizer=None, processor=None, trainer_mode=mode,
                          parameter_sync_step=1, global_steps=1, **attributes)
    trainer._init_dataloader()
    return trainer


@pytest.mark.hook("v1-prompt-sampler")
@pytest.mark.parametrize("mode, ask", [("sync", 4), ("colocate_async", 3)])
def test_v1_trainers_draw_what_they_submit(prepared, mode, ask):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    owners.hooked(prepared, PPOTrainer, "_init_dataloader", "v1.prompts.prompt_sampler")
    trainer = v1_trainer(prepared, mode, 4)
    owners.solved(owners.history_of(trainer), range(0, PROMPTS, 2))
    owners.mixed(owners.history_of(trainer), range(1, PROMPTS, 2))
    numbers = []
    for step in range(30):
        numbers += [int(row) for row in trainer._next_train_batch(ask)["index"]]
        assert owned.of(trainer, owned.Prompts).order.prompts.taken == len(numbers) == ask * (step + 1)
    assert sum(number % 2 for number in numbers) > 0.6 * len(numbers)
    state = trainer.train_dataloader.state_dict()
    expected = [int(row) for _ in range(3) for row in trainer._next_train_batch(ask)["index"]]
    other = v1_trainer(prepared, mode, 4, esgrpo={
        owned.Prompts: owned.Prompts(history=owned.of(trainer, owned.Prompts).history)})
    other.train_dataloader.load_state_dict(state)
    assert [int(row) for _ in range(3) for row in other._next_train_batch(ask)["index"]] == expected


def test_plain_v1_draws_evenly(prepared):
    """Negative control: the same trainer without the hook."""
    trainer = v1_trainer(prepared, "sync", 4)
    assert owned.of(trainer, owned.Prompts).order is None
    trainer.train_dataloader.num_workers = 0
    numbers = [int(row) for _ in range(PROMPTS // 4) for row in trainer._next_train_batch(4)["index"]]
    assert sorted(numbers) == list(range(PROMPTS))
