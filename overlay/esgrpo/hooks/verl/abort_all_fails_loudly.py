"""A failed abort stops the weight sync instead of letting it run on under the requests."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="abort-all-fails-loudly",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_all_requests",
    process=("vllm-server",),
    kind="wrap",
    why="verl 0.9.0 logs \"Error aborting requests\" and goes on: weights are synced into running requests, whose "
        "tokens then come from half-updated weights",
    releases=(Release("verl", ">=0.9,<0.10", {
        "0.9.0": "bef1c5b164258cc7",
        "0.9.0+pause-without-dropped-argument": "a5cc683dac4dad71",
        "0.9.0+resume-without-sleep": "09fcfd5436e408b5",
        "0.9.0+pause-without-dropped-argument.resume-without-sleep": "bdd0308b57e5c376",
    }, cured={
        "0.9.0+abort-all-fails-loudly": "9eb139766c9d630c",
        "0.9.0+abort-all-fails-loudly.pause-without-dropped-argument": "06d52ca44e02a2b9",
        "0.9.0+abort-all-fails-loudly.resume-without-sleep": "8d5897af2a28ef66",
        "0.9.0+series": "8f0b3a1efcd462ba",
        "0.9.1": "99a169b85c66131f",
        "0.9.1+pause-without-dropped-argument": "0e2c60be320eb42f",
    }),),
    remove_when="verl 0.9.0 is no longer supported",
    features=("observe",),
    without=(("==0.7.0", "the recipe's servers cancel requests themselves"),),
)


def build(original):
    @functools.wraps(original)
    async def abort_all_requests(self, *args, **kwargs):
        if self.node_rank != 0:
            return {"aborted_count": 0, "request_ids": []}  # a headless node has no engine and nothing to abort
        result = await original(self, *args, **kwargs)
        if "error" in result:
            from esgrpo.errors import HookError

            raise HookError("abort-all-fails-loudly", result["error"], "all requests aborted before a weight sync",
                            "the sync stops here", "look for 'Error aborting requests' in this server's log")
        return result

    return abort_all_requests
