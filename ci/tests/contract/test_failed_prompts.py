"""A reward that raises, under verl's real rollouter: feed, processing and counters are upstream's, Ray is a fake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract.test_replaced_groups import (  # noqa: E402, F401
    LIMIT,
    PLAIN,
    PROMPTS,
    batch_of,
    rollouter,
    rollouter_class,
    run,
    summaries,
)
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.errors import RunError  # noqa: E402
from esgrpo.hooks.verl.prompts import failed_prompts, in_flight  # noqa: E402
from esgrpo.records import read  # noqa: E402


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_SEGMENT", '{"enable": true}')
    monkeypatch.setenv("ESGRPO_FACTS", '{"prompts_per_version": 8}')
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))


def broken(cause):
    from ray.exceptions import RayTaskError

    return RayTaskError("generate_sequences", f"Traceback ...\n{cause!r}", cause, "ray::AgentLoopWorker.g", 7,
                        "10.0.0.1").as_instanceof_cause()


def made_of(rollouter_class, errors: dict, monkeypatch):  # noqa: F811
    """A rollouter whose prompt number k raises errors[k]."""
    made = rollouter(rollouter_class, [PLAIN])

    async def generate(batch):
        made.served.append(batch)
        await asyncio.sleep(0)
        if len(made.served) - 1 in errors:
            raise errors[len(made.served) - 1]
        return batch_of(summaries(**PLAIN))

    made.async_rollout_manager = SimpleNamespace(generate_sequences_single=generate)
    made._create_continuous_iterator = lambda: in_flight.accounted(made, iter([
        (0, {"raw_prompt": np.array([f"prompt {number}"], dtype=object), "index": np.array([number])})
        for number in range(PROMPTS)]))
    return made


def hooked(rollouter_class):  # noqa: F811
    return wrapped(failed_prompts, rollouter_class._process_single_sample_streaming)


@pytest.mark.hook("failed-prompts-are-bounded")
def test_one_failed_prompt_gives_its_place_to_another(rollouter_class, monkeypatch, tmp_path, capfd):  # noqa: F811
    made = made_of(rollouter_class, {2: broken(ValueError("broke on purpose"))}, monkeypatch)
    asyncio.run(run(made, hooked(rollouter_class)))
    assert len(made.queue.samples) == LIMIT and len(made.served) == LIMIT + 1
    assert made.staleness_samples == made.total_generated_samples == LIMIT
    row, = read(str(tmp_path), "failed")
    assert row["group"] == "uid_sample_0_3" and row["draw"] == 3 and row["reason"] == "ValueError: broke on purpose"
    assert len(in_flight.buffer_of(made).open) == LIMIT  # it has ended; the others are not trained yet
    assert all(entry.responses == 4 and entry.tokens == 12 for entry in in_flight.buffer_of(made).open.values())
    said = capfd.readouterr().err
    assert f"failed prompt: {row['prompt']} (index 2): ValueError: broke on purpose; 1 of 1" in said
    assert failed_prompts.next_version(made) == {"esgrpo/failed_prompts": 1.0}
    assert failed_prompts.next_version(made) == {"esgrpo/failed_prompts": 0.0}


def test_plain_verl_ends_with_the_first(rollouter_class, monkeypatch):  # noqa: F811
    """Negative control."""
    made = made_of(rollouter_class, {2: broken(ValueError("broke on purpose"))}, monkeypatch)
    with pytest.raises(ValueError, match="broke on purpose"):
        asyncio.run(run(made, rollouter_class._process_single_sample_streaming))
    assert len(made.queue.samples) == 2


def test_above_the_bound_one_line_names_error_and_prompts(rollouter_class, monkeypatch):  # noqa: F811
    errors = {number: broken(ValueError("broke on purpose")) for number in range(PROMPTS)}
    made = made_of(rollouter_class, errors, monkeypatch)
    with pytest.raises(RunError) as failure:
        asyncio.run(run(made, hooked(rollouter_class)))
    line = str(failure.value)
    assert "\n" not in line and "ValueError: broke on purpose" in line and "max_failed_prompts=0.01" in line
    assert "2 prompts of one weight version failed" in line and "(index 1)" in line and "(index 0)" in line
    assert len(made.served) == 2


def test_one_in_every_version_goes_on(rollouter_class, monkeypatch):  # noqa: F811
    made = made_of(rollouter_class, {1: ValueError("a"), 3: ValueError("b")}, monkeypatch)
    process = hooked(rollouter_class)

    async def version_after_each(owner, sample):
        await process(owner, sample)
        failed_prompts.next_version(owner)

    asyncio.run(run(made, version_after_each))
    assert len(made.queue.samples) == LIMIT and failed_prompts.bound_of(made).total == 2


@pytest.mark.parametrize("enable", ["true", "false"])
def test_a_dead_process_ends_the_run_at_once(rollouter_class, monkeypatch, enable):  # noqa: F811
    from ray.exceptions import ActorDiedError

    more = ', "max_failed_prompts": 1.0' if enable == "true" else ""
    main = "enable" if enable == "true" else "observe"
    monkeypatch.setenv("ESGRPO_SEGMENT", f'{{"{main}": true{more}}}')
    error = broken(ActorDiedError()) if enable == "true" else broken(ValueError("the baseline arm decides nothing"))
    made = made_of(rollouter_class, {0: error}, monkeypatch)
    with pytest.raises(type(error)):
        asyncio.run(run(made, hooked(rollouter_class)))


@pytest.mark.hook("rollouter-failure-is-loud")
def test_the_rollouters_failure_is_one_line_of_its_own():
    from ray.exceptions import RayTaskError

    from esgrpo.errors import HookError
    from esgrpo.hooks.verl.fixes import rollouter_failure

    ours = HookError("a", "b", "c", "d", "e")
    assert rollouter_failure.said(ours) is ours
    died = RayTaskError("generate", "Traceback ...\nray::vLLMHttpServer.generate() (pid=31, ip=10.0.0.1)\n"
                        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
                        RuntimeError("x"), "ray::vLLMHttpServer.generate", 31, "10.0.0.1")
    line = str(rollouter_failure.said(died))
    assert "the engine (EngineCore) of the vLLM server (node 10.0.0.1, pid 31) died" in line and "\n" not in line
    assert "resume" not in line  # the driver knows whether there is a checkpoint

    class Rollouter:
        async def _streaming_generation_main(self):
            raise died

        async def fit(self):
            await asyncio.gather(self._streaming_generation_main(), return_exceptions=True)

    with pytest.raises(RunError, match="EngineCore"):
        asyncio.run(wrapped(rollouter_failure, Rollouter.fit)(Rollouter()))
    asyncio.run(Rollouter().fit())  # negative control: verl swallows it
