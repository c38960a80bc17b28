"""Control methods of verl's vLLM server: finish members of a group, report the engine's hooks, hand out windows."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="server-control",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    process=("rollouter", "v1-task-runner", "vllm-server"),  # Ray takes the method table where the actor is created
    kind="add",
    why="verl can abort one request or all, which it then resumes; it has no way to end the members of a group with "
        "the tokens they have, and none into EngineCore",
    remove_when="verl's server offers a group abort with a reason, and a generic utility call",
    features=("observe", "cpu"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


async def engine_call(server, name: str, *args) -> list:
    """Call a utility method on every EngineCore of this server (several with internal data parallelism).

    Raises EsgrpoError when one does not answer within the deadline; it carries the call out once it can.
    """
    from esgrpo import engine, guard
    from esgrpo.hooks.verl.server.calls_with_deadline import answers

    if server.node_rank != 0:
        return []  # only rank 0 of a multi-node replica owns the engine
    lost = engine.out_of_action("engine-core-utilities")
    if lost:
        guard.say_once(f"esgrpo: {lost}: this server cannot reach its scheduler, responses run to their own end")
        return []
    client = server.engine.engine_core
    cores = getattr(client, "core_engines", None)
    if cores is None or len(cores) <= 1:
        return await answers([client.call_utility_async(name, *args)], name)
    return await answers([client._call_utility_async(name, *args, engine=core) for core in cores], name)


async def esgrpo_finish_group(self, group, members, rule):
    """End these members (None: all) in the next engine step; returns how many were running here."""
    from esgrpo.hooks.verl.server.control_methods import engine_call

    return sum(await engine_call(self, "esgrpo_finish", group, members, rule))


async def esgrpo_progress(self, group):
    """{member: tokens of its whole response so far} of the members of this group that run here."""
    from esgrpo.hooks.verl.server.control_methods import engine_call

    return {member: tokens for part in await engine_call(self, "esgrpo_progress", group)
            for member, tokens in part.items()}


async def esgrpo_set_segment_length(self, group, length, tail=False):
    """Segments of this group have `length` tokens from now on; `tail` moves it to the tail class.

    Returns how many of its responses are here.
    """
    from esgrpo.hooks.verl.server.control_methods import engine_call

    return sum(await engine_call(self, "esgrpo_set_segment_length", group, length, tail))


async def esgrpo_take_looks(self, groups):
    """{group: {member: looks}} of these groups, each look once (algo/looks.py)."""
    from esgrpo.hooks.verl.server.control_methods import engine_call

    merged = {}
    for part in await engine_call(self, "esgrpo_take_looks", groups):
        for group, looks in part.items():
            merged.setdefault(group, {}).update(looks)
    return merged


async def esgrpo_take_book(self, group, member, attempt):
    """What an engine's book knew of this attempt when it was aborted, or when it ended with stop strings; or None."""
    from esgrpo.hooks.verl.server.control_methods import engine_call

    found = await engine_call(self, "esgrpo_take_book", group, member, attempt)
    return next((payload for payload in found if payload), None)


async def esgrpo_hand_back(self, count):
    """Hand `count` requests back, so that their clients go on with them at another replica; returns how many there
    were. Engines of one server (internal data parallelism) have equal parts."""
    from esgrpo.hooks.verl.server.control_methods import engine_call

    cores = len(getattr(self.engine.engine_core, "core_engines", None) or [0]) if self.node_rank == 0 else 1
    found = await engine_call(self, "esgrpo_hand_back", -(-count // cores))
    if any(bare for _, bare in found):  # vLLM ends what has no token yet at the client's word alone
        states = self.engine.output_processor.request_states
        known = [states[key] for _, bare in found for key in bare if key in states]
        await self.engine.abort([getattr(state, "external_req_id", state.request_id) for state in known])
    return sum(number for number, _ in found)


async def esgrpo_engine_reports(self):
    from esgrpo.hooks.verl.server.control_methods import engine_call

    return await engine_call(self, "esgrpo_report")


async def esgrpo_take_windows(self):
    """The engine windows closed since the last call."""
    from esgrpo.hooks.verl import owned

    kept = owned.of(self, owned.Server)
    windows, kept.windows = kept.windows, []
    return windows


def methods(servers, name: str) -> list:
    """This control method of every server that has it: the user may go on without the hook that adds them."""
    from esgrpo import guard

    found = [getattr(server, name) for server in servers if hasattr(server, name)]
    if len(found) < len(servers):
        guard.say_once("esgrpo: server-control is not in place: servers are not asked for windows, and no response is "
                       "ended, measured or moved")
    return found


METHODS = (esgrpo_finish_group, esgrpo_progress, esgrpo_set_segment_length, esgrpo_take_book, esgrpo_take_looks,
           esgrpo_hand_back, esgrpo_engine_reports, esgrpo_take_windows)


def apply(module) -> None:
    for function in METHODS:
        setattr(module.vLLMHttpServer, function.__name__, function)


def installed(module) -> bool:
    return all(getattr(module.vLLMHttpServer, function.__name__, None) is function for function in METHODS)
