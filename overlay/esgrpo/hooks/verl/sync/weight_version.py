"""Hands the weight version on to the EngineCore, where tokens are stamped with it."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="server-weight-version",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.set_global_steps",
    process=("vllm-server",),
    kind="wrap",
    why="verl stamps a response with the server's version when the request ends; a request that lives through a sync "
        "would look entirely fresh",
    remove_when="verl records the version per token",
    features=("observe",),
    without=(("==0.7.0", "no attempt lives through a weight sync: the rollouter's version is that of its tokens"),),
)


async def around(call):
    from esgrpo import utilisation
    from esgrpo.algo.accounting import lent_back
    from esgrpo.errors import EsgrpoError
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.server import token_outputs
    from esgrpo.hooks.verl.server.calls_with_deadline import say_late
    from esgrpo.hooks.verl.server.control_methods import engine_call

    server = call.owner
    result = await call()
    try:
        windows = await engine_call(server, "esgrpo_set_version", server.global_steps)
    except EsgrpoError:  # verl's weight sync goes on
        say_late("esgrpo_set_version", "tokens have the version before until the engine hears of this one, and a "
                                       "window of it is not recorded")
        windows = []
    closed = [window for window in windows if window is not None]
    if server.rollout_mode.name == "HYBRID":
        closed = [lent_back(window) for window in closed]
    if closed:
        closed[0].update({**token_outputs.take_counts(server), **utilisation.of_process()})
    owned.of(server, owned.Server).windows += closed
    return result
