"""Of a response that nobody reads as text, vLLM's front end makes the first output and the last."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

HOOK = Hook(
    slug="first-and-last-output",
    target="vllm.v1.engine.output_processor:RequestState.make_request_output",
    process=("vllm-server",),
    kind="wrap",  # the original is left out between the first output and the last: those are what nobody reads
    why="of the cumulative outputs that vLLM makes for every token verl keeps the last, and takes the first for the "
        "arrival of the request: with FINAL_ONLY its weight sync would wait for the end of every response. "
        "stream_interval does nothing for cumulative outputs",
    remove_when="vLLM's stream_interval counts for cumulative outputs",
    features=("token_outputs",),
    relies_on=("vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
               "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
               "vllm.v1.engine.detokenizer:IncrementalDetokenizer"),
)


def build(original):  # once for every token of every request, where a Call would cost as much as what is saved
    @functools.wraps(original)
    def make_request_output(self, new_token_ids, pooling_output, finish_reason, *args, **kwargs):
        # by name, not by bind; the names are those of all releases above
        if finish_reason is None and getattr(self, "esgrpo_told", False):
            return None
        output = original(self, new_token_ids, pooling_output, finish_reason, *args, **kwargs)
        if output is not None and _is_read_at_its_end(self):
            self.esgrpo_told = True
        return output

    return make_request_output


def _is_read_at_its_end(state) -> bool:
    """No text (detokenize=False), each output repeats the ones before, and no sibling shares it (n > 1)."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    return (state.output_kind is RequestOutputKind.CUMULATIVE and state.parent_req is None
            and type(state.detokenizer) is IncrementalDetokenizer)
