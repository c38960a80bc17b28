"""The CPU testbed: tasks, reward, parquet files, committed model and its sampling statistics."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.testbed import task  # noqa: E402

MODEL = ROOT / "bench" / "testbed" / "model"


@pytest.mark.parametrize("name", task.TASKS)
def test_problems_depend_on_the_seed_only(name):
    assert task.generate(name, 3, 50) == task.generate(name, 3, 50)
    assert task.generate(name, 3, 50) != task.generate(name, 4, 50)
    assert task.generate(name, 3, 20) == task.generate(name, 3, 50)[:20]


@pytest.mark.parametrize("name", task.TASKS)
def test_splits_are_disjoint(name):
    seen = [{p.prompt for seed in (0, 1) for p in task.generate(name, seed, 1000, split)} for split in task.SPLITS]
    assert all(seen)
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_unknown_task_or_split_is_refused():
    with pytest.raises(ValueError):
        task.generate("nothing", 0, 1)
    with pytest.raises(ValueError):
        task.generate("search", 0, 1, "nothing")


@pytest.mark.parametrize("name", task.TASKS)
def test_answer_is_the_counter_at_the_first_zero(name):
    for problem in task.generate(name, 0, 200):
        match = re.fullmatch(r"(\d\d)[:>](\d\d) (?:\*(\d\d))?\+(\d\d)", problem.prompt)
        counter, value, a, b = (int(part or 1) for part in match.groups())
        while value != 0:
            counter, value = (counter + 1) % 100, (a * value + b) % 100
        assert f"{counter:02d}" == problem.ground_truth


@pytest.mark.parametrize("name", task.TASKS)
def test_demonstrations_fit_and_mix_right_and_wrong(name):
    rng = random.Random(0)
    problems = task.generate(name, 0, 500)
    traces = [task.render_trace(rng, p) for p in problems]
    for trace in traces:
        assert 0 < len(trace.tokens) + trace.finished <= task.MAX_RESPONSE_TOKENS
        assert trace.finished or len(trace.tokens) == task.MAX_RESPONSE_TOKENS
    mean = sum(task.score(t.text, p) for t, p in zip(traces, problems, strict=True)) / len(problems)
    assert 0.3 < mean < 0.7


def test_score_accepts_right_and_rejects_wrong():
    problem = task.Problem("search", "00:86 +07", (0, 1, 2), (86, 93, 0))
    trace = "00:86\n01:93\n02:00\n"
    for right in (f"{trace}x=02", "x=02", f"{trace}x=02<|im_end|>", f"{trace}x=02\n"):
        assert task.score(right, problem) == task.score(right, "02") == 1.0
    for wrong in ("", trace, f"{trace}x=03", "x=2", "x=020", "x=02 ", "y=02", "x=02\n03:62", "x=02x=02", "x=0２"):
        assert task.score(wrong, problem) == 0.0


def test_reward_function_loads_by_path():
    spec = importlib.util.spec_from_file_location("reward_by_path", ROOT / "bench" / "testbed" / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("testbed/search", "x=02", "02") == {"score": 1.0, "acc": True}
    assert module.compute_score("testbed/search", "x=03", "02", extra_info={"index": 0}, other=1) == {
        "score": 0.0,
        "acc": False,
    }


@pytest.mark.parametrize("name", task.TASKS)
def test_parquet_files(name, tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from bench.testbed import make_data

    paths = make_data.write(name, 0, {"train": 6, "val": 2, "test": 3}, tmp_path)
    for split, count in (("train", 6), ("val", 2), ("test", 3)):
        frame = pd.read_parquet(paths[split])
        assert list(frame.columns) == list(make_data.COLUMNS)
        assert len(frame) == count
        for index, (problem, row) in enumerate(
            zip(task.generate(name, 0, count, split), frame.itertuples(), strict=True)
        ):
            assert row.data_source == f"testbed/{name}"
            assert list(row.prompt) == [{"role": "user", "content": problem.prompt}]
            assert isinstance(row.ability, str)
            assert row.reward_model == {"style": "rule", "ground_truth": problem.ground_truth}
            assert row.extra_info == {"split": split, "index": index}


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MODEL)


def test_tokenizer_round_trip_and_chat_tokens(tokenizer):
    from bench.testbed.train_model import Corpus, encode_prompt

    text = "00:53\nwait\n00:53\nx=00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tuple(map(tokenizer.decode, ids)) == task.split_tokens(text)
    for token in ("\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    corpus = Corpus(tokenizer, 0)
    for name in task.TASKS:
        for problem in task.generate(name, 0, 5):
            ids = encode_prompt(tokenizer, problem.prompt)
            assert len(ids) <= task.MAX_PROMPT_TOKENS
            assert corpus._encode(problem.prompt, task.Trace(("x", "=", "00"), True))[0][: len(ids)] == ids


def test_committed_model_loads_and_is_small(tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    assert (MODEL / "model.safetensors").stat().st_size <= 1.4e6
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert model.config.model_type == "qwen2"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_statistics_of_known_samples():
    pytest.importorskip("torch")
    np = pytest.importorskip("numpy")
    from bench.testbed import statistics

    assert statistics.is_loop([9, 1, 2, 1, 2, 1, 2, 1, 2])
    assert not statistics.is_loop([1, 2, 1, 2, 1, 2])
    assert not statistics.is_loop([1, 2, 1, 2, 1, 2, 1, 2, 3])
    assert statistics.is_loop(list(range(32)) * 4) and not statistics.is_loop(list(range(33)) * 4)
    rng = np.random.default_rng(0)
    values = rng.normal(0, np.sqrt(3), (4000, 1)) + rng.normal(0, 1, (4000, 4))
    assert abs(statistics.prompt_share(values) - 0.75) < 0.02
    assert statistics.prompt_share(rng.normal(0, 1, (4000, 4))) < 0.02


@pytest.mark.slow
def test_statistics_of_1000_samples():
    torch = pytest.importorskip("torch")
    from bench.testbed import statistics

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stats = statistics.measure("search", 1000)
    finally:
        torch.set_num_threads(threads)
    # Another CPU rounds differently and so draws other samples: shares may miss by two standard errors, not more.
    for name in ("loop_share", "late_bloomer_share"):
        wanted = statistics.CRITERIA[name][0]
        stats[name] += 2 * (wanted * (1 - wanted) / stats["samples"]) ** 0.5
    assert statistics.failures(stats) == []


@pytest.mark.parametrize("name", task.TASKS)
def test_large_scale_has_long_walks_with_a_tail_and_the_same_rules(name):
    problems = task.generate(name, 0, 300, scale=task.LARGE)
    traces = [task.render_trace(random.Random(i), problem) for i, problem in enumerate(problems)]
    lengths = sorted(len(trace.tokens) for trace in traces)
    assert lengths[-1] == task.LARGE.max_response_tokens and lengths[len(lengths) // 2] < 1500 < lengths[-30]
    for problem, trace in zip(problems, traces, strict=True):
        a, b = task.RULES[name]
        steps = zip(problem.values, problem.values[1:], strict=False)
        assert problem.values[-1] == 0 and all((a * v + b) % 10_000 == w for v, w in steps)
        assert task.score(f"x={problem.ground_truth}", problem) == 1.0 and len(problem.ground_truth) == 4
        assert task.score(f"x={problem.ground_truth[:2]}", problem) == 0.0
        assert set(trace.tokens) <= {*task.WORDS, *":>=x\n"}


def test_demonstrations_keep_to_their_task_and_length(tokenizer):
    from bench.testbed.train_model import Corpus

    corpus = Corpus(tokenizer, 0, task.LARGE, tasks=("search",))
    longest, every = 320, corpus.chunk(1, 200)
    short = corpus.chunk(1, 200, longest)
    assert all(tokenizer.encode(task.SIGNS["chain"])[0] not in ids for ids, _ in every) and len(every) == 200
    assert 0 < len(short) < 150 and {start for _, start in short} == {start for _, start in every}
    assert sum(len(ids) <= 2 * longest for ids, _ in short) > 0.9 * len(short)  # re-tries make some longer


def test_micro_batches_hold_every_demonstration_once_within_the_room():
    from bench.testbed.train_model import micro_batches

    batch = [([0] * length, 1) for length in (5, 90, 7, 30, 8, 100, 31, 6)]
    parts = micro_batches(batch, 64)
    assert [len(ids) for part in parts for ids, _ in part] == [5, 6, 7, 8, 30, 31, 90, 100]
    assert [len(part) for part in parts] == [4, 2, 1, 1]  # one that is longer than the room has it to itself


def test_a_large_model_trains_by_the_same_script(tmp_path):
    transformers = pytest.importorskip("transformers")
    from bench.testbed import train_model

    train_model.main(["--out", str(tmp_path), "--scale", "large", "--hidden", "64", "--layers", "1", "--steps", "1",
                      "--batch", "2"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == task.MAX_PROMPT_TOKENS + task.LARGE.max_response_tokens
    assert model.config.num_attention_heads == 1
    small = train_model.build_model(transformers.AutoTokenizer.from_pretrained(tmp_path), train_model.SIZES["small"])
    committed = transformers.AutoConfig.from_pretrained(MODEL)  # the defaults still make the committed shape
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                "max_position_embeddings", "initializer_range", "vocab_size"):
        assert getattr(small.config, key) == getattr(committed, key), key
