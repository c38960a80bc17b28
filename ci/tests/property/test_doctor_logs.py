"""Who prints a line, in which colour and between which others does not change what a log's failure is."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.tools.doctor import logs

LOGS = Path(__file__).resolve().parents[1] / "unit" / "logs"
NOISE = [line for path in sorted((LOGS / "clean").glob("*.txt")) for line in path.read_text().splitlines()]
FAILURES = [(s.slug, s.excerpt.strip("\n").splitlines()) for s in logs.signatures()] + [
    (path.stem.removesuffix("-one-step"), path.read_text().splitlines())
    for path in sorted((LOGS / "failed").glob("*.txt"))]
UNKNOWN = ["Traceback (most recent call last):", '  File "reward.py", line 7, in score', "    raise KeyError(x)",
           "KeyError: 'gold'"]

worker = st.builds("({}{} pid={}{}) ".format, st.sampled_from(["", "\x1b[36m"]), st.sampled_from(
    ["WorkerDict", "FullyAsyncTaskRunner", "EngineCore_DP0", "vLLMHttpServer", "NPURayWorkerWrapper"]),
    st.integers(1, 99999), st.sampled_from(["", ", ip=172.16.0.86", "\x1b[0m"]))
prefix = st.one_of(st.just(""), worker, st.builds("\x1b[36m{}\x1b[0m".format, worker), st.sampled_from([
    "[2026-03-12 11:17:32] ", "2026-03-12 11:17:32,123 ", "[rank3]: ", "worker-1: ", "(raylet) ",
    "ERROR 09-03 11:03:37 [core.py:712] ", "ERROR 05-29 20:52:26 worker_base.py:581] "]))
suffix = st.sampled_from(["", " [repeated 3x across cluster]", " \x1b[32m [repeated 15x across cluster]\x1b[0m", "\r"])


@st.composite
def interleaved(draw, lines):
    """The lines in their order, all by one process, with lines of clean runs between them."""
    who = "".join(draw(st.lists(prefix, max_size=3)))
    tail = draw(suffix)
    mixed = []
    for line in lines:
        mixed += draw(st.lists(st.sampled_from(NOISE), max_size=4))
        mixed.append(who + line + tail)
    return mixed + draw(st.lists(st.sampled_from(NOISE), max_size=4))


def failures(answer: logs.Answer) -> list[str]:
    return [m.signature.slug for m in answer.matches if m.signature.weight != "notice"]


@given(st.data())
def test_the_answer_stays(data):
    slug, lines = data.draw(st.sampled_from(FAILURES))
    plain, mixed = logs.read(lines), logs.read(data.draw(interleaved(lines)))
    assert mixed.matches[0].signature.slug == slug
    assert failures(mixed) == failures(plain)
    assert mixed.matches[0].groups == plain.matches[0].groups


@given(interleaved(UNKNOWN))
def test_the_innermost_exception_stays(mixed):
    answer = logs.read(mixed)
    assert answer.state == "unknown" and answer.innermost.strip() == "KeyError: 'gold'"


@given(st.lists(st.sampled_from(NOISE), max_size=60))
def test_what_went_well_has_no_failure(lines):
    answer = logs.read(lines)
    assert answer.state in ("clean", "unfinished", "empty") and not answer.innermost
