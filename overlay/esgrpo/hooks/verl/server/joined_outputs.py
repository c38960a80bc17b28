"""Attempts of one response as one of verl's TokenOutputs. No hook; versions of weights are the callers'.

Source: verl's FullyAsyncLLMServerClient.generate, step 2.
"""

from __future__ import annotations


def append(total, output) -> None:
    """Add a later attempt's tokens and what the engine says of them. An attempt without a token says nothing of any:
    log-probs and experts are then those of the next one."""
    total.token_ids = [*total.token_ids, *output.token_ids]
    if output.log_probs is not None:
        total.log_probs = [*(total.log_probs or ()), *output.log_probs]
    if output.routed_experts is not None and len(output.token_ids):
        import numpy as np

        # earlier tokens were routed by the weights that made them: the first experts that there are have the prompt's,
        # of later ones only the new tokens' count
        total.routed_experts = output.routed_experts if total.routed_experts is None else np.concatenate(
            [total.routed_experts, output.routed_experts[-len(output.token_ids):]])
    if output.num_preempted is not None:
        total.num_preempted = (total.num_preempted or 0) + output.num_preempted
    total.stop_reason = output.stop_reason
