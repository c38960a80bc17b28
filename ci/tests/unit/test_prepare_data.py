"""Data of the recipes, from fixtures in the raw formats of the hub's files."""

import importlib.util
from pathlib import Path

import pytest

datasets = pytest.importorskip("datasets")
FILE = Path(__file__).resolve().parents[3] / "bench" / "recipes" / "prepare_data.py"
spec = importlib.util.spec_from_file_location("prepare_data", FILE)
prepare_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_data)

GSM8K = [{"question": "Tom has 3 apples and buys 1,000 more. How many?", "answer": "3 + 1000 = 1003\n#### 1,003"},
         {"question": "A loss?", "answer": "It is <<2-5=-3>>-3\n#### -3"}]


def competition(text: str, answer: str, source: str) -> dict:
    return {"data_source": source, "prompt": [{"content": text, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{text}"}, "unused": 1}


@pytest.fixture
def raw(tmp_path):
    def write(name, rows):
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{name}.parquet"))

    write("gsm8k-train", GSM8K)
    write("gsm8k-test", GSM8K[:1])
    write("dapo-math-17k", [competition(text, "34", "math_dapo") for text in ("a", "b", "a", "b", "a")])
    write("aime-2024", [competition("x", "204", "aime2024"), competition("x", "204", "aime2024")])
    return tmp_path


def test_all_sets(raw, tmp_path, capsys):
    assert prepare_data.main(["--out", str(tmp_path / "out"), "--raw", str(raw)]) == 0
    out, cache = tmp_path / "out", str(tmp_path / "cache")
    rows = {name: datasets.Dataset.from_parquet(str(out / f"{name}.parquet"), cache_dir=cache)
            for name in prepare_data.SETS}
    assert {name: len(found) for name, found in rows.items()} == {
        "gsm8k/train": 2, "gsm8k/test": 1, "dapo-math-17k/train": 2, "aime-2024/test": 1}  # copies are gone
    for found in rows.values():
        assert set(found.column_names) == set(prepare_data.COLUMNS)
    first, second = rows["gsm8k/train"]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1003"}
    assert second["reward_model"]["ground_truth"] == "-3" and second["extra_info"]["index"] == 1
    assert first["prompt"][0]["role"] == "user" and first["prompt"][0]["content"].endswith('after "####".')
    assert [row["prompt"][0]["content"] for row in rows["dapo-math-17k/train"]] == ["a", "b"]
    assert capsys.readouterr().out.count("rows") == 4


def test_rows_that_are_not_of_the_set(raw, tmp_path, capsys):
    with pytest.raises(ValueError, match="no '#### NUMBER'"):
        prepare_data.gsm8k({"question": "?", "answer": "42"}, 0, "train")
    datasets.Dataset.from_list(GSM8K).to_parquet(str(raw / "dapo-math-17k.parquet"))
    assert prepare_data.main(["--out", str(tmp_path), "--raw", str(raw), "--only", "dapo-math-17k"]) == 2
    assert "no column data_source" in capsys.readouterr().err
    assert not (tmp_path / "dapo-math-17k").exists()


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert prepare_data.main(["--out", str(tmp_path), "--raw", str(tmp_path / "none"), "--only", "gsm8k"]) == 2
    assert capsys.readouterr().err.startswith("prepare_data: gsm8k/train: ")


@pytest.mark.parametrize("answer, score", [("#### 1003", 1.0), ("#### 1004", 0.0)])
def test_verl_scores_a_prepared_row(answer, score):
    reward = pytest.importorskip("verl.utils.reward_score")
    row = prepare_data.gsm8k(GSM8K[0], 0, "train")
    assert float(reward.default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])) == score
