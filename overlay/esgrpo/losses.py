"""Losses and advantages of ES-GRPO as pure functions of tensors.

Shapes: B rows (samples) by T response positions, right-padded. `response_mask` is 1 on response tokens of kept rows
and 0 elsewhere; a row without any 1 is a pruned (or empty) row. Log-probabilities and entropies are in nats, both at
the training temperature. A *loss matrix* is the per-token loss, to be minimised and not yet aggregated: the caller
divides by the number of tokens or rows it wants, so nothing here touches a denominator.

Equation numbers refer to UloRL (arXiv 2507.19766). Metrics are detached 0-dim tensors. Values at positions where
`response_mask` is 0 never reach a metric, not even a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

# A log ratio beyond this is numerical rubbish; verl clamps at the same value, and SAIS must equal verl's own loss.
_LOG_RATIO_BOUND = 20.0


def _same_shape(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors have one shape: broadcasting would silently train on a wrong product."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}")


def _masked_mean(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Mean of `values` [B, T] over the response tokens; 0 when there is none. Detached, at least float32."""
    mask = response_mask.bool()
    # where, not a product: a NaN on padding must not survive as NaN * 0
    kept = torch.where(mask, _metric_float(values), 0.0)
    return kept.sum() / mask.sum().clamp(min=1)


def _metric_float(values: torch.Tensor) -> torch.Tensor:
    """Detached copy in at least float32: bfloat16 has too few digits for sums over a batch."""
    values = values.detach()
    return values if values.dtype == torch.float64 else values.float()


def pois_matrix(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Pseudo-on-policy importance sampling: loss matrix [B, T] = -A * exp(logp - stopgrad(logp)).

    UloRL replaces every segment's old policy by the current one, so r = 1 for every token and nothing is clipped.
    Written with a stop-gradient this holds at every optimiser step, whatever the number of mini-batches and of steps
    between two weight syncs; the gradient is that of REINFORCE, -A * grad logp.

    Args:
        log_prob: [B, T], current policy, carries the gradient.
        advantages: [B, T].

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(log_prob=log_prob, advantages=advantages)
    return -advantages * torch.exp(log_prob - log_prob.detach())


def clipped_matrix(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped importance sampling: loss matrix [B, T] = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r = exp(logp - old_logp). With the log-probs of the version that made each token this is SAIS (UloRL: f(i) is the
    segment of token i); with those under the last synced weights it is POIS with `anchor=version`. For A < 0 the loss
    is bounded by -A * clip_c (dual clip, arXiv 1912.09729), as verl's `vanilla` does.

    Args:
        log_prob: [B, T], current policy, carries the gradient.
        old_log_prob: [B, T], the denominator; treated as a constant.
        advantages: [B, T].
        clip_low, clip_high: widths of the clip interval below and above 1.
        clip_c: dual-clip bound of r for negative advantages, > 1.

    Returns:
        (loss matrix, per-token events as bool [B, T]: "clipped", "clipped_lower", and float "log_ratio")

    Raises:
        ValueError: the shapes differ or clip_c <= 1.
    """
    _same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages)
    if not clip_c > 1.0:
        raise ValueError(f"clip_c is {clip_c}, must be greater than 1: at 1 it would cut the on-policy gradient")
    log_ratio = (log_prob - old_log_prob.detach()).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    pessimistic = torch.maximum(plain, bounded)
    floor = -advantages * clip_c
    matrix = torch.where(advantages < 0, torch.min(floor, pessimistic), pessimistic)
    events = {
        "clipped": (bounded > plain).detach(),
        "clipped_lower": ((pessimistic > floor) & (advantages < 0)).detach(),
        "log_ratio": log_ratio.detach(),
    }
    return matrix, events


def clip_metrics(events: dict[str, torch.Tensor], response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Token means of the events of `clipped_matrix`, under the names verl's own losses use.

    Returns:
        "actor/pg_clipfrac", "actor/pg_clipfrac_lower" (fractions of response tokens) and "actor/ppo_kl" (nats).
    """
    return {
        "actor/pg_clipfrac": _masked_mean(events["clipped"], response_mask),
        "actor/ppo_kl": _masked_mean(-events["log_ratio"], response_mask),
        "actor/pg_clipfrac_lower": _masked_mean(events["clipped_lower"], response_mask),
    }


def correct_rows(scores: torch.Tensor, success_threshold: float, acc: Sequence | None = None) -> torch.Tensor:
    """Which samples count as correct (the paper's "reward 1"): bool [B].

    A boolean `acc` is taken as it is. A number is compared with the threshold, because verl's reward managers copy a
    plain score into `acc`, so that -1 may mean wrong. A row whose `acc` is missing (None, NaN) is judged by its score.

    Args:
        scores: [B], sum of the token-level scores of each row, before any KL penalty.
        success_threshold: a number at or above it is correct.
        acc: B values (bool, number, 0-dim tensor or array scalar, None), or None when the reward function has none.

    Raises:
        ValueError: `acc` has another length than `scores`.
    """
    values = scores.detach().tolist()
    if acc is not None and len(acc) != len(values):
        raise ValueError(f"acc has {len(acc)} rows, scores has {len(values)}")
    verdicts = []
    for row, score in enumerate(values):
        verdict = score if acc is None else acc[row]
        verdict = verdict.item() if hasattr(verdict, "item") else verdict
        if verdict is None or verdict != verdict:  # NaN is the only value that differs from itself
            verdict = score
        verdicts.append(verdict if isinstance(verdict, bool) else verdict >= success_threshold)
    return torch.tensor(verdicts, dtype=torch.bool, device=scores.device)


def dmmpt_mask(
    log_prob: torch.Tensor,
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    correct: torch.Tensor,
    *,
    tau: float,
    sigma: float,
) -> torch.Tensor:
    """Dynamic masking of well-mastered positive tokens (eq. 10): bool [B, T], True where the loss is taken out.

    A token is masked when its sample is correct, the mean entropy of its sample is below sigma, and the current
    policy gives the token a probability of at least tau. Set the loss matrix to 0 there and aggregate with the
    *unchanged* response mask: masked tokens stay in the denominator, as in the paper's objective.

    Args:
        log_prob: [B, T], current policy.
        entropy: [B, T], full-vocabulary entropy of the distribution each response token was drawn from.
        response_mask: [B, T].
        correct: [B] bool.
        tau: probability from which a token counts as mastered (paper: 0.99).
        sigma: entropy, in nats, below which masking starts (paper: 0.2).

    Raises:
        ValueError: shapes do not match.
    """
    _same_shape(log_prob=log_prob, entropy=entropy, response_mask=response_mask)
    if correct.shape != log_prob.shape[:1]:
        raise ValueError(f"correct has shape {tuple(correct.shape)}, wanted {tuple(log_prob.shape[:1])}")
    mask = response_mask.bool()
    tokens = mask.sum(dim=-1)
    row_entropy = torch.where(mask, _metric_float(entropy), 0.0).sum(dim=-1) / tokens.clamp(min=1)
    gated = correct.bool() & (row_entropy < sigma) & (tokens > 0)
    mastered = torch.exp(_metric_float(log_prob)) >= tau
    return gated.unsqueeze(-1) & mastered & mask


def dmmpt_metrics(masked: torch.Tensor, response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `dmmpt_mask` took out: "masked_fraction" of the response tokens, "masked_rows" of the kept rows."""
    kept = response_mask.bool().any(dim=-1)
    touched = (masked.any(dim=-1) & kept).sum()
    return {
        "masked_fraction": _masked_mean(masked, response_mask),
        "masked_rows": touched.float() / kept.sum().clamp(min=1),
    }


def drift_metrics(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the current policy is from the one that made the tokens; nothing in POIS bounds it, so it is reported.

    Args:
        log_prob: [B, T], current policy.
        rollout_log_prob: [B, T], policy that sampled each token.
        response_mask: [B, T].

    Returns:
        "log_kl_rollout_current": token mean of rollout_logp - logp in nats, the unbiased one-sample estimate of
        KL(rollout || current) under the tokens' own sampler; a single batch may give a negative value.
        "effective_sample_size": (sum w)^2 / (N sum w^2) of the token weights w = exp(logp - rollout_logp), in (0, 1];
        1 when there is no token, as there is no drift either.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(log_prob=log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    mask = response_mask.bool()
    log_weight = _metric_float(log_prob) - _metric_float(rollout_log_prob)
    chosen = log_weight[mask]
    if chosen.numel() == 0:
        ess = log_weight.new_ones(())
    else:
        # log-sum-exp: the fraction is invariant to a common factor, and weights may overflow on their own
        ess = torch.exp(2 * chosen.logsumexp(0) - (2 * chosen).logsumexp(0) - math.log(chosen.numel()))
    return {"log_kl_rollout_current": _masked_mean(-log_weight, mask), "effective_sample_size": ess}


@dataclass(frozen=True)
class Tossed:
    """What is known of each of B rows, all of it fixed before the row's coin but `cut` and `left_out`.

    `pi` in (0, 1] is what its weight is the inverse of; `pivot` the reward that its group is measured from, of a row
    with pi < 1 that has no prediction; `reward` what was predicted of a candidate (else None), `cut` whether it was
    cut, `decided_at` its tokens when it was decided; `left_out` whether its group's statistics do without it.
    """

    pi: Sequence[float]
    pivot: Sequence[float | None]
    reward: Sequence[float | None] | None = None
    cut: Sequence[bool] | None = None
    decided_at: Sequence[int | None] | None = None
    left_out: Sequence[bool] | None = None

    def __post_init__(self):
        columns = (self.pi, self.pivot, self.reward, self.cut, self.decided_at, self.left_out)
        if len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("columns of different lengths")

    def predicted(self, rows: Sequence[int]) -> bool:
        return self.reward is not None and any(self.reward[row] is not None for row in rows)

    def weighted(self, rows: Sequence[int]) -> bool:
        return any(self.pi[row] < 1 for row in rows)


def grpo_segment_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    tossed: Tossed | None = None,
) -> torch.Tensor:
    """GRPO advantages [B, T] in which rows that are left out take no part: A = (R - mean) / (std + epsilon) over the
    kept ones.

    `tossed.left_out` says which; where it is not known, those whose response mask is empty. A row that verl's
    rollout_rs rejected has an empty mask as well, but verl's estimators count its reward. The advantage of a row with
    an empty mask is 0. Where one kept row remains, there is no baseline and its advantage is 0 too. A group that was
    sampled with one row keeps verl's rule (mean 0, std 1). With every row kept the result equals verl's `grpo` bit for
    bit; the arithmetic below follows its order of operations for that reason. A group with a predicted reward gets
    `predicted_advantages`, another one in which a coin was tossed (pi < 1) `weighted_advantages`.

    Args:
        token_level_rewards: [B, T]; a row's reward is the sum over all of its T positions.
        response_mask: [B, T], 0 or 1.
        index: B group ids.
        norm_by_std: False leaves out the division (Dr.GRPO).
        epsilon: added to the standard deviation.
        tossed: what is known of the rows, or None.

    Raises:
        ValueError: shapes or lengths do not match, or a group with weights or predictions is to be divided by its
            standard deviation: that of the complete group is not known, and any estimate of it biases the gradient.
    """
    _same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    if len(index) != token_level_rewards.shape[0]:
        raise ValueError(f"index has {len(index)} rows, the batch has {token_level_rewards.shape[0]}")
    if tossed is not None and len(tossed.pi) != len(index):
        raise ValueError(f"{len(tossed.pi)} keep probabilities for {len(index)} rows")
    with torch.no_grad():
        scores = token_level_rewards.sum(dim=-1)
        kept = ([not left_out for left_out in tossed.left_out] if tossed is not None and tossed.left_out is not None
                else response_mask.bool().any(dim=-1).tolist())
        groups: dict[Hashable, list[int]] = {}
        for row, group in enumerate(index):
            groups.setdefault(group, []).append(row)
        advantages, by_token = torch.zeros_like(scores), {}
        for members in groups.values():
            rows = [row for row in members if kept[row]]
            predicted = tossed is not None and tossed.predicted(members)
            weighted = tossed is not None and tossed.weighted(members)
            if (predicted or weighted) and norm_by_std:
                raise ValueError("no standard deviation of a group with weights or predicted rewards: "
                                 "norm_adv_by_std_in_grpo=False")
            if predicted:
                by_token[tuple(members)] = predicted_advantages(scores[members], response_mask[members],
                                                                _of(tossed, members))
            elif weighted:
                pivot = next(tossed.pivot[row] for row in members if tossed.pi[row] < 1)
                advantages[rows] = weighted_advantages(scores[rows], [tossed.pi[row] for row in rows], len(members),
                                                       pivot)
            elif len(rows) == 1 and len(members) == 1:
                # 0-dim tensors, not Python numbers: 1 + epsilon is rounded in float32 as verl does
                mean, std = torch.tensor(0.0), torch.tensor(1.0)
                advantages[rows[0]] = _normalised(scores[rows[0]], mean, std, norm_by_std, epsilon)
            elif len(rows) > 1:
                group_scores = scores[rows]
                mean, std = torch.mean(group_scores), torch.std(group_scores)
                advantages[rows] = _normalised(group_scores, mean, std, norm_by_std, epsilon)
        result = advantages.unsqueeze(-1) * response_mask
        for members, values in by_token.items():
            result[list(members)] = values
        return result


def _of(tossed: Tossed, rows: Sequence[int]) -> Tossed:
    return Tossed(*([column[row] for row in rows] if column is not None else None for column in
                    (tossed.pi, tossed.pivot, tossed.reward, tossed.cut, tossed.decided_at, tossed.left_out)))


def weighted_advantages(scores: torch.Tensor, pi: Sequence[float], size: int, pivot: float) -> torch.Tensor:
    """Advantages of the kept rows of one group of `size` sampled rows, their weights w = 1 / pi folded in.

    A_i = w_i (n - 1) / n * [(R_i - c) - 1 / (n - 1) * sum over kept j != i of w_j (R_j - c)]

    Unbiased for the mean-baseline GRPO gradient of the whole group, given its n complete responses: each coin has
    E[w] = 1 given all that was known before it, so E[w_i] = E[w_i w_j] = 1 for i != j, and with all w = 1 the formula
    is R_i - mean(R). What would be wrong: a mean that includes row i has a term w_i^2, with E[w_i^2] = 1 / pi_i; a
    mean divided by sum w is a ratio, biased in small groups; so is a division by an estimated standard deviation, which
    has no bound either where what is left of a group agrees; and a denominator of the loss that counts kept tokens is
    correlated with the weights. The pivot c, any reward known before the group's first coin, changes nothing in that
    expectation and much in the variance: with c the common reward of the finished members, a group whose outcome was
    foreseen has the advantage 0 in every row instead of on average. Bounded by max w max |R - c| (1 + max w). A row
    that is left alone, since its siblings failed, gets verl's rule of one (mean 0): w R.

    The weight may sit in the advantage because pois, sais and all of verl's losses but clip_cov, kl_cov and dro are
    positively homogeneous in it. KL and entropy terms have no advantage and are not weighted.
    """
    weights = 1 / torch.tensor(pi, dtype=torch.float64, device=scores.device)
    if size == 1:
        return (weights * scores).to(scores.dtype)
    # the pivot is rounded like the rewards: an equal reward must give exactly 0
    centred = (scores - torch.tensor(pivot, dtype=scores.dtype, device=scores.device)).double()
    weighted = weights * centred
    others = (weighted.sum() - weighted) / (size - 1)
    return (weights * (size - 1) / size * (centred - others)).to(scores.dtype)


def predicted_advantages(scores: torch.Tensor, response_mask: torch.Tensor, tossed: Tossed) -> torch.Tensor:
    """Advantages [n, T] of one group in which rewards were predicted: treatments `value` and `doubly_robust`.

    With m_i the prediction, k_i = 0 for a cut row and else 1, w_i = k_i / pi_i (pi_i = 1 under `value`):
        reward of the group   S_i = m_i + w_i (R_i - m_i)               R_i where nothing was predicted
        baseline              b_i = mean of S_j over j != i
        up to the decision    A_i = (n - 1) / n (S_i - b_i)
        after it (pi_i < 1)   A_i = (n - 1) / n w_i (R_i - b_i)         0 for the few tokens of a cut row

    Given the n complete responses and E[w] = 1 of each coin given all before it, E[S_i] = R_i and E[w_i b_i] = b_i, so
    that with pi < 1 the sum over tokens is unbiased for the mean-baseline gradient, whatever m is. With pi = 1 a row
    that was cut is trained as far as it came: what is missing is the gradient of its tail. Linear in the advantage:
    under a clipped loss the correction holds to first order. Bounded by 2 (max |R| + max |m|) max w.

    Args:
        scores: [n], of the complete responses; what a cut one got is not looked at.
        response_mask: [n, T].
        tossed: of these n rows.
    """
    size, like = len(tossed.pi), dict(dtype=torch.float64, device=scores.device)
    exact, cut = scores.double(), torch.tensor(tossed.cut, device=scores.device)
    known = torch.tensor([reward is not None for reward in tossed.reward], device=scores.device)
    # rounded like the rewards: an equal reward must give exactly 0
    predicted = torch.tensor([reward or 0.0 for reward in tossed.reward], dtype=scores.dtype,
                             device=scores.device).double()
    weights = torch.where(cut, 0.0, 1 / torch.tensor(tossed.pi, **like))
    reward = torch.where(known, predicted + weights * (exact - predicted), exact)
    alone = size == 1  # verl's rule: mean 0
    others = torch.zeros_like(reward) if alone else (reward.sum() - reward) / (size - 1)
    share = 1.0 if alone else (size - 1) / size
    ends = torch.tensor([at if at is not None and pi < 1 else response_mask.shape[1]
                         for at, pi in zip(tossed.decided_at, tossed.pi, strict=True)], device=scores.device)
    tail = response_mask.cumsum(-1) > ends.unsqueeze(-1)
    values = torch.where(tail, (weights * (exact - others)).unsqueeze(-1), (reward - others).unsqueeze(-1))
    return (share * values).to(scores.dtype) * response_mask


def _normalised(
    scores: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, norm_by_std: bool, epsilon: float
) -> torch.Tensor:
    """(scores - mean) / (std + epsilon), or scores - mean, in the dtype of `scores`."""
    centred = scores - mean
    return ((centred / (std + epsilon)) if norm_by_std else centred).to(scores.dtype)
