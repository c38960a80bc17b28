"""What the trainers ask the prompt history: forecasts for prompts that start, and outcomes of groups that ended."""

from __future__ import annotations

FORECAST = "esgrpo_forecast"


def forecasts(owner, raw_prompts, version) -> list[dict]:
    from esgrpo.algo.history import prompt_key
    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    history = history_of(owner)
    return [history.forecast(prompt_key(prompt), version) for prompt in raw_prompts]


def observe(owner, raw_prompt, rows: list[dict], version) -> None:
    """One group. Each row: tokens, score (None: no reward yet), acc (None: the score decides), summary (None: unknown).

    The length of a response that did not come to its own end is a lower bound, as it is for one that filled the
    response budget.
    """
    from esgrpo.algo.history import came_to_its_end, chance_of_correct, prompt_key
    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    budget = owner.config.data.max_response_length
    correct, capped = [], []
    for row in rows:
        full = row["tokens"] >= budget
        ended = came_to_its_end((row["summary"] or {}).get("outcome"), full)
        correct.append(chance_of_correct(row["summary"], None if row["score"] is None else _correct(row), full))
        capped.append(full or not ended)
    history_of(owner).observe(prompt_key(raw_prompt), [row["tokens"] for row in rows], correct, capped, version)


def _correct(row: dict) -> bool:
    import torch

    from esgrpo import config
    from esgrpo.losses import correct_rows

    acc = None if row["acc"] is None else [row["acc"]]
    return bool(correct_rows(torch.tensor([float(row["score"])]), config.current().success_threshold, acc)[0])
