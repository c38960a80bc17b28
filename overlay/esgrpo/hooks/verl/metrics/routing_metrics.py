"""What history, queue and router report once per weight version, through rollouter_windows."""

from __future__ import annotations


async def at_weight_version(rollouter) -> dict[str, float]:
    """Metrics since the last weight version; the history is saved on this occasion."""
    from esgrpo import engine
    from esgrpo.hooks.verl.metrics import decision_counts

    features, found = engine.active_features(), {}
    if "history" in features:
        from esgrpo.hooks.verl.prompts.prompt_forecasts import calibration_of
        from esgrpo.hooks.verl.prompts.prompt_history import history_of, save

        found.update({f"esgrpo/history/{name}": value for name, value in calibration_of(rollouter).metrics().items()})
        found["esgrpo/history/prompts"] = len(history_of(rollouter))
        save(rollouter)
    order = getattr(getattr(rollouter, "pending_queue", None), "order", None)
    if order is not None:
        counts = order.take_counts()
        found.update({f"esgrpo/routing/{name}": value for name, value in counts.items()})
        decision_counts.add("routing", **counts)
    balancer = getattr(getattr(rollouter, "llm_server_manager", None), "global_load_balancer", None)
    if "routing" in features and hasattr(balancer, "esgrpo_take_metrics"):  # the handle of a TailRouter has it
        from esgrpo.hooks.verl.server.calls_with_deadline import answers_if_any

        for taken in await answers_if_any([balancer.esgrpo_take_metrics.remote()], "take_metrics",
                                          "esgrpo/routing/* lacks the router's part"):
            found.update({f"esgrpo/routing/{name}": value for name, value in taken.items()})
            decision_counts.add("routing", moves=taken["moves"])
    return found
