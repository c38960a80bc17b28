"""Rules: facts of environment.py -> findings, each with a fix. A rule that fails becomes a finding of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from esgrpo import compat, releases
from esgrpo.engine import State
from esgrpo.tools import language
from esgrpo.tools.doctor.environment import Devices, Environment

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (OK, NOTE, WARNING, ERROR)
STACKS = Path(__file__).with_name("stacks.toml")
TEXTS = Path(__file__).with_name("texts.toml")
TRAINED = ("verl", "vllm", "vllm-ascend", "ray")  # what hooks touch: their rows in compat.toml count
PYTHON = ((3, 10), (3, 13))  # from, below
GCC = (9, 0)  # the first that PyTorch's C++17 headers take
CXXABI = 11  # 1.3.11, GCC 8: what manylinux_2_28 wheels may ask for
NZ_RELEASES = "<0.28"  # vllm-ascend pull request 14830 drops VLLM_ASCEND_ENABLE_NZ after 0.27.1
HCCL_SECONDS = {"HCCL_CONNECT_TIMEOUT": (120, 7200)}
LOOPED = ">=0.9"  # verl whose FSDP trainer hands packed tokens to the loop
LOOPED_TOKENS_PER_S = 5_400  # forward and backward, verl 0.9.1, torch 2.11: 58 s for 314,000 tokens, linear in them
CANN_SCRIPT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
NNAL_SCRIPT = "/usr/local/Ascend/nnal/atb/set_env.sh"
RECIPE = "0.7.0"  # the one release whose fully async lives in a recipe that knows no HCCL


@dataclass(frozen=True)
class Finding:
    """One line of the table; level is one of LEVELS."""

    name: str
    level: str
    found: str
    fix: str = ""


def _say(name: str, /, **values) -> str:
    return language.texts(TEXTS, name, **values)


def stacks() -> list[dict]:
    """The Ascend stacks that upstream documents: name, source, install, versions."""
    return compat.toml(STACKS)["stack"]


def fits(found: str, wanted: str) -> bool:
    """Same release, or inside the specifier; local, pre and post parts do not count."""
    from packaging.specifiers import SpecifierSet

    if wanted[:1].isdigit():
        return releases.public(found) == releases.public(wanted)
    return SpecifierSet(wanted).contains(releases.public(found), prereleases=True)


def nearest_stack(versions: dict[str, str], documented: list[dict]) -> dict:
    """The stack that agrees in most versions; where several do, the one of this verl."""
    def agreement(stack: dict) -> tuple[int, bool]:
        same = [name for name, wanted in stack["versions"].items() if name in versions and fits(versions[name], wanted)]
        return len(same), "verl" in same

    return max(documented, key=agreement)


def python(env: Environment) -> Iterator[Finding]:
    low, below = PYTHON
    good = low <= tuple(map(int, env.python.split(".")[:2])) < below
    yield Finding("python", OK if good else ERROR, env.python, "" if good else _say("python-releases"))
    for name in env.missing:
        yield Finding(name, ERROR, _say("needed-by-hooks"), f"pip install {name}")
    for name in env.broken:
        yield Finding(name, ERROR, _say("metadata-broken"),
                      f"pip install --force-reinstall --no-deps {name}")


def tested(env: Environment) -> Iterator[Finding]:
    """Against compat.toml: what each release was tested as, and the nearest tuple that trained."""
    rows = compat.load()
    for name in TRAINED:
        version = env.versions.get(name) or env.versions.get(f"{name}-cpu")
        if version is None:
            continue
        levels = [r.level for r in rows if fits(version, r.versions.get(name, r.versions.get(f"{name}-cpu", "0")))]
        if levels:
            yield Finding(name, OK, _say("tested", version=version, level=min(levels, key=compat.LEVELS.index)))
        else:
            drift = _say("drift-says", name=name, version=version) if name != "vllm-ascend" else _say("see-compat")
            yield Finding(name, WARNING, _say("not-tested", version=version), _say("fingerprints-decide", drift=drift))
    if not env.ascend:
        verdict = compat.verdict(env.versions, rows)
        yield Finding("tuple", OK if verdict.startswith("tested") else NOTE, verdict)
        if "torch" in env.versions:
            yield Finding("torch", OK, env.versions["torch"])
    for name in ("verl", "vllm", "ray", "torch"):
        if not {name, f"{name}-cpu"} & {*env.versions, *env.broken}:
            yield Finding(name, WARNING, _say("not-installed"), _say("install-or-move"))


def ascend_stack(env: Environment) -> Iterator[Finding]:
    """Against the nearest stack that upstream documents."""
    if not env.ascend:
        return
    stack = nearest_stack(env.versions, stacks())
    have = {**env.versions, **({"CANN": env.cann} if env.cann else {})}
    yield Finding("stack", OK, _say("nearest-stack", name=stack["name"]))
    for name, wanted in stack["versions"].items():
        if name in have and not fits(have[name], wanted):
            yield Finding(name, WARNING, _say("stack-differs", found=have[name], name=stack["name"], wanted=wanted),
                          _install(name, wanted, stack))
        elif name in ("torch", "torch-npu") and name in have:
            yield Finding(name, OK, _say("stack-agrees", found=have[name], name=stack["name"]))
        elif name in ("torch-npu", "vllm-ascend") and name not in have:
            yield Finding(name, ERROR, _say("stack-lacks", name=stack["name"], wanted=wanted),
                          _install(name, wanted, stack))
    for one, other in (("torch-npu", "torch"), ("vllm-ascend", "vllm")):
        if one in have and other in have and releases.public(have[one]) != releases.public(have[other]):
            yield Finding(f"{one} / {other}", ERROR, _say("pair-differs", one=have[one], other=have[other]),
                          _say("pair-install", other=other, version=releases.public(have[one])))


def _install(name: str, wanted: str, stack: dict) -> str:
    if name in ("torch", "torch-npu", "ray"):
        return f"pip install {name}=={wanted}"
    return _say("install-order", source=stack["source"])


def cann(env: Environment) -> Iterator[Finding]:
    if not env.ascend:
        return
    if not env.cann:
        yield Finding("CANN", ERROR, _say("not-found"), _say("cann-install", script=CANN_SCRIPT))
    elif not {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"} & env.variables.keys():
        yield Finding("CANN", ERROR, _say("cann-not-set", version=env.cann),
                      _say("source-before-ray", script=CANN_SCRIPT))
    else:
        yield Finding("CANN", OK, env.cann)
    if "vllm-ascend" in env.versions and "ATB_HOME_PATH" not in env.variables:
        yield Finding("NNAL", WARNING, _say("variable-not-set", name="ATB_HOME_PATH"),
                      _say("nnal-else", script=NNAL_SCRIPT))


def devices(env: Environment) -> Iterator[Finding]:
    npu_fix = _say("map-npu")
    for kind, found, wanted, variable in (("npu", env.npu, env.ascend, "ASCEND_RT_VISIBLE_DEVICES"),
                                          ("gpu", env.gpu, False, "CUDA_VISIBLE_DEVICES")):
        if found.ids:
            cards = ",".join(map(str, sorted(set(found.ids))))
            yield Finding(f"{kind} driver", OK, found.driver or _say("unknown-driver"))
            yield Finding(f"{kind} devices", OK, _say("cards", count=len(found.ids), name=found.names[0], cards=cards))
        elif wanted:
            yield Finding(f"{kind} driver", ERROR, f"npu-smi info: {found.problem}", npu_fix)
        for card in found.unhealthy:
            yield Finding(f"{kind} {card.partition(':')[0]}", ERROR, _say("unhealthy", card=card), _say("leave-out"))
        if variable in env.variables:
            yield visible(variable, env.variables[variable], found)
    if not env.npu.ids and not env.gpu.ids and not env.ascend:
        yield Finding("devices", NOTE, _say("no-devices"), _say("cpu-needs-none"))


def visible(variable: str, value: str, found: Devices) -> Finding:
    """Indices into what this container has, counted from 0; others vanish in silence or end in 'Invalid device ID'."""
    ids = [part.strip() for part in value.split(",") if part.strip()]
    uuids = variable.startswith("CUDA") and any(part.startswith(("GPU-", "MIG-")) for part in ids)
    if uuids:
        return Finding(variable, OK, value)
    first_n = _say("visible-fix", variable=variable, count=len(found.ids))
    if not ids or not all(part.isdigit() for part in ids) or len(set(ids)) < len(ids):
        return Finding(variable, ERROR, _say("visible-no-list", value=repr(value)), first_n)
    beyond = [part for part in ids if found.ids and int(part) >= len(found.ids)]
    if beyond:
        return Finding(variable, ERROR, _say("visible-beyond", value=value, beyond=",".join(beyond),
                                                      count=len(found.ids)), first_n)
    return Finding(variable, OK, value if found.ids else value + _say("unchecked"))


def collectives(env: Environment) -> Iterator[Finding]:
    """What verl 0.7.0's recipe lacks on NPUs, by the patches that cure it."""
    if not env.ascend or not fits(env.versions.get("verl", "0"), RECIPE):
        return
    needs = {"sync-weights-over-stateless-group": _say("needs-sync")}
    if sorted(set(env.npu.ids)) != list(range(8)):
        needs["derive-npu-uuid-from-visible-devices"] = _say("needs-uuid")
    if env.megatron:
        needs["default-flash-attention-under-mindspeed"] = _say("needs-flash")
    for slug, why in needs.items():
        done = slug in env.patched
        yield Finding("verl patch", OK if done else ERROR,
                      _say("patch-applied", slug=slug) if done else f"verl {RECIPE}: {why}",
                      "" if done else f"./apply.sh --only {slug} VERL_CHECKOUT")
    if env.versions.get("ray") and not fits(env.versions["ray"], ">=2.60"):
        done = "add-hccl-collective-group" in env.patched
        yield Finding("ray hccl", OK if done else NOTE, _say("ray-hccl-applied" if done else "ray-hccl-missing"),
                      "" if done else _say("ray-hccl-for", command="./apply.sh --installed ray"))


def log_probs(env: Environment) -> Iterator[Finding]:
    """verl.utils.torch_functional.logprobs_from_logits: flash-attn's or torch-npu's kernel, else a loop over tokens."""
    looped = env.gpu.ids and not env.ascend and fits(env.versions.get("verl", "0"), LOOPED)
    if looped and not env.flash_attn:
        yield Finding("flash-attn", WARNING, _say("no-flash-attn", rate=f"{LOOPED_TOKENS_PER_S:,}"),
                      _say("flash-attn-fix", settings="actor_rollout_ref.model.use_fused_kernels=True "
                           "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch"))


def compiler(env: Environment) -> Iterator[Finding]:
    command, version = env.compiler
    if version is None:
        yield Finding("compiler", NOTE, _say("no-gcc", command=command), _say("gcc-for"))
    elif version < GCC:
        level = ERROR if env.ascend and "vllm-ascend" not in env.versions else WARNING
        yield Finding("compiler", level, _say("gcc-old", command=command, version=f"{version[0]}.{version[1]}"),
                      _say("gcc-fix"))
    else:
        yield Finding("compiler", OK, _say("gcc", command=command, version=f"{version[0]}.{version[1]}"))


def libstdcxx(env: Environment) -> Iterator[Finding]:
    loaded, beside = env.loaded, env.beside
    if loaded.cxxabi < 0:
        yield Finding("libstdc++", NOTE, _say("no-cxxabi", path=loaded.path) if loaded.path
                      else _say("no-libstdcxx"), _say("may-not-load"))
    elif beside.cxxabi > loaded.cxxabi:
        yield Finding("libstdc++", ERROR, _say("cxxabi-two", path=loaded.path, found=loaded.cxxabi,
                                                         other=beside.path, wanted=beside.cxxabi),
                      _say("library-path", folder=Path(beside.path).parent))
    elif loaded.cxxabi < CXXABI:
        yield Finding("libstdc++", WARNING, _say("cxxabi", path=loaded.path, found=loaded.cxxabi),
                      _say("libstdcxx-fix"))
    else:
        yield Finding("libstdc++", OK, _say("cxxabi", path=loaded.path, found=loaded.cxxabi))


def megatron(env: Environment) -> Iterator[Finding]:
    if "mindspeed" in env.versions:
        yield Finding("mindspeed", OK, env.versions["mindspeed"])
    if env.megatron:
        yield Finding("megatron", OK, _say("megatron-at", folder=env.megatron,
                                             version=env.versions.get("megatron-core", _say("unknown-driver"))))
    elif "mindspeed" in env.versions:
        yield Finding("megatron", ERROR, _say("megatron-missing"), _say("megatron-fix"))


def variables(env: Environment) -> Iterator[Finding]:
    """Environment variables that change what a run does."""
    values = env.variables
    if values:
        yield Finding("variables", OK, ", ".join(f"{name}={value}" for name, value in sorted(values.items())))
    if values.get("VLLM_USE_V1", "1") not in ("1", ""):
        yield Finding("VLLM_USE_V1", ERROR, values["VLLM_USE_V1"], _say("v1-needed"))
    ascend = env.versions.get("vllm-ascend")
    if ascend and fits(ascend, NZ_RELEASES) and values.get("VLLM_ASCEND_ENABLE_NZ", "1") != "0":
        yield Finding("VLLM_ASCEND_ENABLE_NZ", ERROR, values.get("VLLM_ASCEND_ENABLE_NZ", _say("nz-default")),
                      _say("nz-fix"))
    for name, (low, high) in HCCL_SECONDS.items():
        if not env.ascend:
            break
        value = values.get(name)
        if value is None:
            yield Finding(name, NOTE, _say("hccl-default", low=low), _say("hccl-fix", name=name))
        elif not value.isdigit() or not low <= int(value) <= high:
            yield Finding(name, WARNING, value, _say("hccl-range", low=low, high=high))
    noset = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    ids = [part.strip() for part in values.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if values.get(noset) and ids and ids != [str(i) for i in range(len(ids))]:
        yield Finding(noset, WARNING, _say("noset-found", ids=",".join(ids)),
                      _say("noset-fix"))
    if any(not part for part in values.get("PYTHONPATH", ".").split(":")):
        yield Finding("PYTHONPATH", NOTE, _say("pythonpath-empty"), _say("pythonpath-fix"))
    if values.get("ESGRPO_STRICT") == "0":
        yield Finding("ESGRPO_STRICT", WARNING, "0", _say("strict-fix"))
    if values.get("ESGRPO_DISABLE"):
        yield Finding("ESGRPO_DISABLE", WARNING, values["ESGRPO_DISABLE"], _say("disable-fix"))


def hooks(states: Callable[[], list[dict]]) -> Iterator[Finding]:
    """States as `esgrpo status` shows them; what differs from the tested source stops a strict run that needs it."""
    rows = states()
    for state, level in ((State.DRIFTED, ERROR), (State.FAILED, ERROR), (State.INCOMPATIBLE, WARNING)):
        bad = [row for row in rows if row["state"] == state.value]
        if bad:
            slugs = ", ".join(row["slug"] for row in bad)
            yield Finding("hooks", level, f"{state.value}: {slugs} ({bad[0]['reason']})",
                          _say("hooks-fix"))
    absent = [row for row in rows if row["state"] == State.ABSENT.value]
    if absent:
        upstreams = ", ".join(sorted({row["upstream"] for row in absent}))
        yield Finding("hooks", NOTE, _say("hooks-absent", count=len(absent), upstreams=upstreams),
                      _say("install-or-move"))
    counts = Counter(sorted(row["state"] for row in rows if row not in absent))
    if counts or not absent:
        told = ", ".join(f"{n} {state}" for state, n in counts.items())
        yield Finding("hooks", OK, _say("hooks-counted", counts=told))


RULES = (python, tested, ascend_stack, cann, devices, collectives, log_probs, compiler, libstdcxx, megatron, variables)


def check(env: Environment, states: Callable[[], list[dict]]) -> list[Finding]:
    """All findings, in the order of RULES."""
    found = []
    for rule, subject in (*((rule, env) for rule in RULES), (hooks, states)):
        try:
            found += rule(subject)
        except Exception as error:  # a broken installation must not stop the doctor
            said = f"{type(error).__name__}: {error}"
            found.append(Finding(rule.__name__, ERROR, _say("could-not-check", error=said), _say("could-not-fix")))
    return found


def heads() -> list[str]:
    """Of the table's columns."""
    return [_say("head-check"), _say("head-state"), _say("head-found")]


def exit_code(findings: list[Finding]) -> int:
    """By the worst finding: 0 ok and notes, 1 warnings, 2 errors."""
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return max(0, worst - LEVELS.index(NOTE))
