"""What the trainers ask the prompt history: forecasts for prompts that start, and outcomes of groups that ended."""

from __future__ import annotations

FORECAST = "esgrpo_forecast"


def forecasts(owner, raw_prompts, version) -> list[dict]:
    from esgrpo.algo.history import prompt_key
    from esgrpo.hooks.verl.prompt_history import history_of

    history = history_of(owner)
    return [history.forecast(prompt_key(prompt), version) for prompt in raw_prompts]


def observe(owner, raw_prompt, rows: list[dict], version) -> None:
    """One group. Each row: tokens, score (None: no reward yet), acc (None: the score decides), summary (None: unknown).

    A response that was pruned or interrupted is not the one that would have been: it says nothing about correctness,
    and its length is a lower bound, as it is for one that filled the response budget.
    """
    from esgrpo.algo.history import prompt_key
    from esgrpo.hooks.verl.prompt_history import history_of

    budget = owner.config.data.max_response_length
    correct, capped = [], []
    for row in rows:
        full, outcome = row["tokens"] >= budget, (row["summary"] or {}).get("outcome")
        cut = outcome == "prune" or (outcome == "abort" and not full)
        correct.append(None if cut or row["score"] is None else _correct(row))
        capped.append(cut or full)
    history_of(owner).observe(prompt_key(raw_prompt), [row["tokens"] for row in rows], correct, capped, version)


def _correct(row: dict) -> bool:
    import torch

    from esgrpo import config
    from esgrpo.losses import correct_rows

    acc = None if row["acc"] is None else [row["acc"]]
    return bool(correct_rows(torch.tensor([float(row["score"])]), config.current().success_threshold, acc)[0])
