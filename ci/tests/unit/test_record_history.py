"""Samples of a starting model as the history that a run begins with."""

from __future__ import annotations

import gzip
import json

from bench.pretrained import record_history
from esgrpo import config
from esgrpo.algo.history import PromptHistory, prompt_key


def kept_samples(groups: list[dict]) -> dict:
    """As `bench.pretrained.measure --keep` writes them; `samples` of a group are (tokens, reward)."""
    return {"cap": 256, "groups": [
        {"family": "chain_sum", "question": group["question"],
         "samples": [{"ids": [1] * tokens, "reward": reward_} for tokens, reward_ in group["samples"]]}
        for group in groups]}


def test_a_history_of_kept_samples_knows_each_prompt_under_the_key_that_verl_asks_with():
    easy, hard, unseen = ("4 + 3 - 18 =", "7 - 2 + 90 - 4 =", "2 + 2 =")
    made = record_history.of_kept(kept_samples([{"question": easy, "samples": [(40, 1.0)] * 7 + [(60, 0.0)]},
                                                {"question": hard, "samples": [(256, 0.0)] * 8}]))
    read = PromptHistory.from_state(config.History(), json.loads(json.dumps(made.to_state())), budget=256)
    key = {text: prompt_key([{"role": "user", "content": text}]) for text in (easy, hard, unseen)}
    chances = {text: alpha / (alpha + beta) for text in key for alpha, beta in [read.posterior(key[text])]}
    assert chances[easy] > chances[unseen] > chances[hard]
    forecasts = {text: read.forecast(key[text]) for text in key}
    assert forecasts[easy]["known"] and forecasts[hard]["known"] and not forecasts[unseen]["known"]
    assert forecasts[easy]["tokens"] < forecasts[hard]["tokens"] <= 256
    whole, cut = (PromptHistory(config.History(), budget=256) for _ in range(2))
    for history, capped in ((whole, False), (cut, True)):  # a length that the budget ended is a lower bound
        history.observe(key[easy], [40] * 7 + [60], [1.0] * 7 + [0.0], [False] * 8, 0)
        history.observe(key[hard], [256] * 8, [0.0] * 8, [capped] * 8, 0)
    assert made.lengths.to_state() == cut.lengths.to_state() != whole.lengths.to_state()


def test_what_is_no_file_of_samples_leaves_no_history(tmp_path, capsys):
    kept, out = tmp_path / "kept.json.gz", tmp_path / "history.json"
    for content in (b"no gzip", gzip.compress(b'{"groups": [{}]}'), gzip.compress(b"[]")):
        kept.write_bytes(content)
        assert record_history.main([str(kept), "--out", str(out)]) == 1
        assert capsys.readouterr().err.count("|") == 4 and not out.exists()
