"""Bubble rate per weight version, logged through verl's Tracking with the rollouter's own timings."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="rollouter-windows",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.reset_staleness",
    process=("rollouter",),
    kind="wrap",
    why="its result is what the trainer logs once per weight version; verl's own utilisation counts prompts in "
        "flight, not requests in the engine",
    remove_when="verl reports engine occupancy per weight version",
    features=("observe",),
    without=(("==0.7.0", "bubble rates are not measured"),),
)


async def around(call):
    from esgrpo.hooks.verl.metrics import decision_counts, loop_events, prune_metrics
    from esgrpo.hooks.verl.metrics.routing_metrics import at_weight_version
    from esgrpo.hooks.verl.prompts import failed_prompts, in_flight

    rollouter = call.owner
    history = loop_events.history_of(rollouter)
    timing = await call()
    event = loop_events.of_rollouter(rollouter, history, timing.get("fully_async/rollouter/step_generated_samples"))
    found = {**timing, **await metrics(rollouter, timing, event),
             **loop_events.metrics_of(event), **prune_metrics.take(rollouter),
             **failed_prompts.next_version(rollouter), **in_flight.take_metrics(rollouter),
             **await in_flight.next_version(rollouter), **await at_weight_version(rollouter)}
    return {**found, **decision_counts.of_rollouter(rollouter)}


async def metrics(rollouter, timing, event=None) -> dict[str, float]:
    from esgrpo import records
    from esgrpo.hooks.verl.metrics import engine_windows, loop_events
    from esgrpo.hooks.verl.prompts import prompt_order
    from esgrpo.hooks.verl.server.calls_with_deadline import answers_if_any
    from esgrpo.hooks.verl.server.control_methods import methods

    servers = [server for replica in rollouter.llm_server_manager.get_replicas() for server in replica.servers]
    answers = await answers_if_any([call.remote() for call in methods(servers, "esgrpo_take_windows")], "take_windows",
                                   "esgrpo/bubble_rate lacks this version")
    windows = [window for answer in answers for window in answer]
    loop_events.write_rollout(rollouter, event, windows)
    paused = timing["fully_async/rollouter/version_time"] - timing["fully_async/rollouter/active_time"]
    return {**engine_windows.told(windows, paused), "esgrpo/records/dropped_by_rollouter": records.dropped(),
            **prompt_order.metrics_of(rollouter)}
