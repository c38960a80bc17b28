"""Which failures are those of one prompt, and how many of them a weight version may have."""

import pytest

from esgrpo.algo.failures import Failed, FailedPrompts, FailureStreak, brief, first_of, is_of_one_prompt
from esgrpo.errors import HookError


def failures(*groups):
    return [Failed(group, f"key-{group}", "ValueError: broke") for group in groups]


@pytest.mark.parametrize(("share", "prompts", "allowed"), [
    (0.01, 8, 1), (0.01, 512, 5), (0.0, 512, 0), (1.0, 8, 8), (0.5, 1, 1)])
def test_the_share_allows_at_least_one_prompt_unless_it_is_zero(share, prompts, allowed):
    bound = FailedPrompts(share, prompts)
    bound.observe(0, failures(*map(str, range(allowed))))
    assert not bound.too_many
    bound.observe(0, failures("one more"))
    assert bound.too_many


def test_a_group_counts_once_and_a_new_version_starts_anew():
    bound = FailedPrompts(0.01, 8)
    assert [f.group for f in bound.observe(1, failures("a"))] == ["a"]
    assert bound.observe(1, failures("a")) == [] and not bound.too_many
    assert len(bound.observe(2, failures("b"))) == 1 and not bound.too_many
    assert bound.total == 2
    bound.observe(2, failures("c", "d", "e"))
    assert bound.too_many
    assert str(bound) == ("ValueError: broke; 4 prompts of one weight version failed: key-e, key-d, key-c and 1 more")


def test_errors_of_one_prompt_and_of_a_process_that_is_gone():
    exceptions = pytest.importorskip("ray.exceptions")

    def raised_in_a_worker(cause):
        return exceptions.RayTaskError("compute_score", "Traceback ...\nlast line", cause, pid=7, ip="10.0.0.1")

    class EngineDeadError(RuntimeError):
        """As vLLM's, by name."""

    broke = raised_in_a_worker(ValueError("broke\nsecond line"))
    for error in (ValueError("broke"), broke, broke.as_instanceof_cause(), RuntimeError("tool")):
        assert is_of_one_prompt(error)
    assert brief(broke.as_instanceof_cause()) == "ValueError: broke"
    assert brief(KeyError()) == "KeyError: without a message"
    gone = exceptions.ActorDiedError()
    for error in (gone, raised_in_a_worker(gone), raised_in_a_worker(gone).as_instanceof_cause(),
                  exceptions.WorkerCrashedError(), EngineDeadError("x"), raised_in_a_worker(EngineDeadError("x")),
                  HookError("a", "b", "c", "d", "e"), MemoryError()):
        assert not is_of_one_prompt(error), error


def test_an_error_is_found_as_it_was_raised_however_deep_ray_has_wrapped_it():
    class Shipped(HookError):  # as RayTaskError.as_instanceof_cause makes it
        def __init__(self, raised):
            super().__init__("ray", "a traceback", "none", "the text is long", "read on")
            self.cause = raised

    ours = HookError("a hook", "this", "that", "it stops", "do so")
    outer = ValueError("other")
    outer.__cause__ = Shipped(Shipped(ours))
    assert first_of(outer, HookError) is ours and first_of(Shipped(ours), HookError) is ours
    assert first_of(outer, KeyError) is None and first_of(None, HookError) is None


def test_the_latest_prompts_are_named_and_the_others_counted():
    bound = FailedPrompts(0.01, 8)
    bound.observe(0, failures(*"abc"))
    assert str(bound) == "ValueError: broke; 3 prompts of one weight version failed: key-c, key-b, key-a"
    bound.observe(0, [Failed("d", "key-d", "KeyError: late")])
    assert str(bound) == "KeyError: late; 4 prompts of one weight version failed: key-d, key-c, key-b and 1 more"


def test_failures_in_a_row_end_with_a_new_group_that_ended_well():
    streak = FailureStreak(limit=3)
    assert not streak.observe(["a", "b"], []) and streak.observe(["c"], [])
    assert not streak.observe([], ["good"]) and streak.in_a_row == 0
    assert not streak.observe(["d", "e"], ["good"])  # the same one waits on: no news
    assert streak.observe(["f"], ["good"])
    assert not streak.observe(["g"], ["good", "better"]) and streak.in_a_row == 1
    assert not streak.observe([], []) and streak.in_a_row == 1
