"""Asks vLLM for the token ids and log-probs of a response without the text of every token."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="token-outputs",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
    process=("vllm-server",),
    kind="wrap",
    why="verl reads token ids and log-probs, yet with its SamplingParams vLLM decodes every token, and once more for "
        "its log-prob, in the process that also takes requests and weight syncs. verl has no key for detokenize",
    remove_when="verl's server sets detokenize=False",
    features=("token_outputs",),
    without=(("==0.7.0", "not made for its server: tokens are still turned into text there"),),
)


async def around(call):
    server = call.owner
    given = call.arguments["sampling_params"]
    call.arguments["sampling_params"] = asked = without_text(given)
    count(server, asked.get("detokenize") is False and "detokenize" not in given)
    return await call()


def count(server, without: bool) -> None:
    """Until the next weight version, whose window takes the counts along."""
    from esgrpo.hooks.verl import owned

    counts = owned.of(server, owned.Texts)
    counts.responses += without
    counts.with_text += not without


def take_counts(server) -> dict[str, dict[str, int]]:
    """What is added to the window of a weight version; nothing where no request was looked at."""
    from esgrpo.hooks.verl import owned

    counts = vars(owned.take(server, owned.Texts))
    return {"token_outputs": counts} if any(counts.values()) else {}


def without_text(parameters: dict) -> dict:
    """vLLM sampling parameters for the same tokens and log-probs; what the caller says itself stays."""
    from vllm import SamplingParams

    # stop strings are looked for in the text; prompt log-probs are read as a list, and 0 of them means the token's own
    if parameters.get("stop") or parameters.get("prompt_logprobs") is not None:
        return parameters
    flat = {"flat_logprobs": True} if hasattr(SamplingParams, "flat_logprobs") else {}  # since vLLM 0.12
    return {"detokenize": False, **flat, **parameters}
