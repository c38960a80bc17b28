"""Rules: facts of environment.py -> findings, each with a fix. A rule that fails becomes a finding of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from esgrpo import compat
from esgrpo.engine import State, public_version
from esgrpo.tools.doctor.environment import Devices, Environment

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (OK, NOTE, WARNING, ERROR)
STACKS = Path(__file__).with_name("stacks.toml")
TRAINED = ("verl", "vllm", "vllm-ascend", "ray")  # what hooks touch: their rows in compat.toml count
PYTHON = ((3, 10), (3, 13))  # from, below
GCC = (9, 0)  # the first that PyTorch's C++17 headers take
CXXABI = 11  # 1.3.11, GCC 8: what manylinux_2_28 wheels may ask for
NZ_RELEASES = "<0.28"  # vllm-ascend pull request 14830 drops VLLM_ASCEND_ENABLE_NZ after 0.27.1
HCCL_SECONDS = {"HCCL_CONNECT_TIMEOUT": (120, 7200)}
LOOPED = ">=0.9"  # verl whose FSDP trainer hands packed tokens to the loop
LOOPED_TOKENS_PER_S = 5_400  # forward and backward, verl 0.9.1, torch 2.11: 58 s for 314,000 tokens, linear in them
RECIPE = "0.7.0"  # the one release whose fully async lives in a recipe that knows no HCCL


@dataclass(frozen=True)
class Finding:
    """One line of the table; level is one of LEVELS."""

    name: str
    level: str
    found: str
    fix: str = ""


def stacks() -> list[dict]:
    """The Ascend stacks that upstream documents: name, source, install, versions."""
    return compat.toml(STACKS)["stack"]


def fits(found: str, wanted: str) -> bool:
    """Same release, or inside the specifier; local, pre and post parts do not count."""
    from packaging.specifiers import SpecifierSet

    if wanted[:1].isdigit():
        return public_version(found) == public_version(wanted)
    return SpecifierSet(wanted).contains(public_version(found), prereleases=True)


def nearest_stack(versions: dict[str, str], documented: list[dict]) -> dict:
    """The stack that agrees in most versions; where several do, the one of this verl."""
    def agreement(stack: dict) -> tuple[int, bool]:
        same = [name for name, wanted in stack["versions"].items() if name in versions and fits(versions[name], wanted)]
        return len(same), "verl" in same

    return max(documented, key=agreement)


def python(env: Environment) -> Iterator[Finding]:
    low, below = PYTHON
    good = low <= tuple(map(int, env.python.split(".")[:2])) < below
    yield Finding("python", OK if good else ERROR, env.python, "" if good else "use Python 3.10, 3.11 or 3.12")
    for name in env.missing:
        yield Finding(name, ERROR, "not installed, and no hook loads without it", f"pip install {name}")
    for name in env.broken:
        yield Finding(name, ERROR, "installed, but its metadata has no version",
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
            yield Finding(name, OK, f"{version}, tested: {min(levels, key=compat.LEVELS.index)}")
        else:
            drift = f"esgrpo drift {name}=={version} says what changed" if name != "vllm-ascend" else "see compat.toml"
            yield Finding(name, WARNING, f"{version}, not in compat.toml", f"fingerprints decide; {drift}")
    if not env.ascend:
        verdict = compat.verdict(env.versions, rows)
        yield Finding("tuple", OK if verdict.startswith("tested") else NOTE, verdict)
        if "torch" in env.versions:
            yield Finding("torch", OK, env.versions["torch"])
    for name in ("verl", "ray", "torch"):
        if name not in env.versions and name not in env.broken:
            yield Finding(name, WARNING, "not installed", "install it, or run this in the environment of the training")


def ascend_stack(env: Environment) -> Iterator[Finding]:
    """Against the nearest stack that upstream documents."""
    if not env.ascend:
        return
    stack = nearest_stack(env.versions, stacks())
    have = {**env.versions, **({"CANN": env.cann} if env.cann else {})}
    yield Finding("stack", OK, f"nearest documented: {stack['name']}; not run on an NPU by this project")
    for name, wanted in stack["versions"].items():
        if name in have and not fits(have[name], wanted):
            yield Finding(name, WARNING, f"{have[name]}, {stack['name']} has {wanted}", _install(name, wanted, stack))
        elif name in ("torch", "torch-npu") and name in have:
            yield Finding(name, OK, f"{have[name]}, as {stack['name']} has it")
        elif name in ("torch-npu", "vllm-ascend") and name not in have:
            yield Finding(name, ERROR, f"not installed, {stack['name']} has {wanted}", _install(name, wanted, stack))
    for one, other in (("torch-npu", "torch"), ("vllm-ascend", "vllm")):
        if one in have and other in have and public_version(have[one]) != public_version(have[other]):
            yield Finding(f"{one} / {other}", ERROR, f"{have[one]} / {have[other]}: not the same release",
                          f"install {other} {public_version(have[one])}; vllm-ascend goes in after vllm")


def _install(name: str, wanted: str, stack: dict) -> str:
    if name in ("torch", "torch-npu", "ray"):
        return f"pip install {name}=={wanted}"
    return f"install order: {stack['source']}"


def cann(env: Environment) -> Iterator[Finding]:
    if not env.ascend:
        return
    if not env.cann:
        yield Finding("CANN", ERROR, "not found", "install the toolkit, then source "
                                                  "/usr/local/Ascend/ascend-toolkit/set_env.sh")
    elif not {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"} & env.variables.keys():
        yield Finding("CANN", ERROR, f"{env.cann}, but its environment is not set",
                      "source /usr/local/Ascend/ascend-toolkit/set_env.sh before `ray start`")
    else:
        yield Finding("CANN", OK, env.cann)
    if "vllm-ascend" in env.versions and "ATB_HOME_PATH" not in env.variables:
        yield Finding("NNAL", WARNING, "ATB_HOME_PATH is not set",
                      "source /usr/local/Ascend/nnal/atb/set_env.sh, else: libatb.so: cannot open shared object file")


def devices(env: Environment) -> Iterator[Finding]:
    npu_fix = "map /dev/davinci*, davinci_manager, devmm_svm, hisi_hdc and the driver into the container"
    for kind, found, wanted, variable in (("npu", env.npu, env.ascend, "ASCEND_RT_VISIBLE_DEVICES"),
                                          ("gpu", env.gpu, False, "CUDA_VISIBLE_DEVICES")):
        if found.ids:
            cards = ",".join(map(str, sorted(set(found.ids))))
            yield Finding(f"{kind} driver", OK, found.driver or "unknown")
            yield Finding(f"{kind} devices", OK, f"{len(found.ids)} x {found.names[0]}, cards {cards}")
        elif wanted:
            yield Finding(f"{kind} driver", ERROR, f"npu-smi info: {found.problem}", npu_fix)
        for card in found.unhealthy:
            yield Finding(f"{kind} {card.partition(':')[0]}", ERROR, f"health {card}", "leave it out, or reset it")
        if variable in env.variables:
            yield visible(variable, env.variables[variable], found)
    if not env.npu.ids and not env.gpu.ids and not env.ascend:
        yield Finding("devices", NOTE, "neither npu-smi nor nvidia-smi lists any",
                      "none is needed for the CPU platform (VERL_PLATFORM=cpu)")


def visible(variable: str, value: str, found: Devices) -> Finding:
    """Indices into what this container has, counted from 0; others vanish in silence or end in 'Invalid device ID'."""
    ids = [part.strip() for part in value.split(",") if part.strip()]
    uuids = variable.startswith("CUDA") and any(part.startswith(("GPU-", "MIG-")) for part in ids)
    if uuids:
        return Finding(variable, OK, value)
    first_n = f"export {variable}=0,1,... (at most {len(found.ids)} here), before `ray start`"
    if not ids or not all(part.isdigit() for part in ids) or len(set(ids)) < len(ids):
        return Finding(variable, ERROR, f"{value!r}: not a list of different numbers", first_n)
    beyond = [part for part in ids if found.ids and int(part) >= len(found.ids)]
    if beyond:
        return Finding(variable, ERROR, f"{value}: no device {','.join(beyond)}, {len(found.ids)} are here", first_n)
    return Finding(variable, OK, f"{value}{'' if found.ids else ' (nothing to check it against)'}")


def collectives(env: Environment) -> Iterator[Finding]:
    """What verl 0.7.0's recipe lacks on NPUs, by the patches that cure it."""
    if not env.ascend or not fits(env.versions.get("verl", "0"), RECIPE):
        return
    needs = {"sync-weights-over-stateless-group": "its weight sync asks ray for HCCL: NCCL is not available"}
    if sorted(set(env.npu.ids)) != list(range(8)):
        needs["derive-npu-uuid-from-visible-devices"] = "it asks npu-smi for cards 0..7, other cards are here"
    if env.megatron:
        needs["default-flash-attention-under-mindspeed"] = "MindSpeed needs use_flash_attn=True for ref and critic, too"
    for slug, why in needs.items():
        done = slug in env.patched
        yield Finding("verl patch", OK if done else ERROR, f"{slug} is applied" if done else f"verl {RECIPE}: {why}",
                      "" if done else f"./apply.sh --only {slug} VERL_CHECKOUT")
    if env.versions.get("ray") and not fits(env.versions["ray"], ">=2.60"):
        done = "add-hccl-collective-group" in env.patched
        yield Finding("ray hccl", OK if done else NOTE, "HCCL group is " + ("applied" if done else "missing"),
                      "" if done else "only for other users of ray.util.collective: ./apply.sh --installed ray")


def log_probs(env: Environment) -> Iterator[Finding]:
    """verl.utils.torch_functional.logprobs_from_logits: flash-attn's or torch-npu's kernel, else a loop over tokens."""
    looped = env.gpu.ids and not env.ascend and fits(env.versions.get("verl", "0"), LOOPED)
    if looped and not env.flash_attn:
        yield Finding("flash-attn", WARNING, "not installed: verl's FSDP trainer takes log-probs one token at a time "
                      f"({LOOPED_TOKENS_PER_S:,} tokens/s on an H200 with 33 M parameters)",
                      "install flash-attn, or set actor_rollout_ref.model.use_fused_kernels=True "
                      "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch")


def compiler(env: Environment) -> Iterator[Finding]:
    command, version = env.compiler
    if version is None:
        yield Finding("compiler", NOTE, f"{command}: no GCC", "needed only to build from source: GCC 9 or newer")
    elif version < GCC:
        level = ERROR if env.ascend and "vllm-ascend" not in env.versions else WARNING
        yield Finding("compiler", level, f"{command} is GCC {version[0]}.{version[1]}: PyTorch's C++17 needs 9",
                      "conda install -c conda-forge gcc_linux-aarch64=11 gxx_linux-aarch64=11 (x86_64: -64), export CC "
                      "and CXX")
    else:
        yield Finding("compiler", OK, f"{command} is GCC {version[0]}.{version[1]}")


def libstdcxx(env: Environment) -> Iterator[Finding]:
    loaded, beside = env.loaded, env.beside
    if loaded.cxxabi < 0:
        yield Finding("libstdc++", NOTE, "none is found by the loader" if not loaded.path else
                      f"{loaded.path}: no CXXABI in it", "compiled packages may not load")
    elif beside.cxxabi > loaded.cxxabi:
        yield Finding("libstdc++", ERROR, f"{loaded.path} has CXXABI_1.3.{loaded.cxxabi}, {beside.path} has "
                      f"CXXABI_1.3.{beside.cxxabi}",
                      f"export LD_LIBRARY_PATH={Path(beside.path).parent}:$LD_LIBRARY_PATH before `ray start`")
    elif loaded.cxxabi < CXXABI:
        yield Finding("libstdc++", WARNING, f"{loaded.path} has CXXABI_1.3.{loaded.cxxabi}",
                      "conda install -c conda-forge libstdcxx-ng, then LD_LIBRARY_PATH=$CONDA_PREFIX/lib")
    else:
        yield Finding("libstdc++", OK, f"{loaded.path} has CXXABI_1.3.{loaded.cxxabi}")


def megatron(env: Environment) -> Iterator[Finding]:
    if "mindspeed" in env.versions:
        yield Finding("mindspeed", OK, env.versions["mindspeed"])
    if env.megatron:
        yield Finding("megatron", OK, f"{env.versions.get('megatron-core', 'unknown')} in {env.megatron}")
    elif "mindspeed" in env.versions:
        yield Finding("megatron", ERROR, "MindSpeed is installed, megatron.core is not on the path",
                      "export PYTHONPATH=$PYTHONPATH:/path/to/Megatron-LM on every node before `ray start`")


def variables(env: Environment) -> Iterator[Finding]:
    """Environment variables that change what a run does."""
    values = env.variables
    if values:
        yield Finding("variables", OK, ", ".join(f"{name}={value}" for name, value in sorted(values.items())))
    if values.get("VLLM_USE_V1", "1") not in ("1", ""):
        yield Finding("VLLM_USE_V1", ERROR, values["VLLM_USE_V1"], "unset it: segments live in the V1 engine")
    ascend = env.versions.get("vllm-ascend")
    if ascend and fits(ascend, NZ_RELEASES) and values.get("VLLM_ASCEND_ENABLE_NZ", "1") != "0":
        yield Finding("VLLM_ASCEND_ENABLE_NZ", ERROR, values.get("VLLM_ASCEND_ENABLE_NZ", "not set, which means 1"),
                      "export VLLM_ASCEND_ENABLE_NZ=0: wake_up refuses NZ weights")
    for name, (low, high) in HCCL_SECONDS.items():
        if not env.ascend:
            break
        value = values.get(name)
        if value is None:
            yield Finding(name, NOTE, f"not set, {low} s", f"export {name}=1200: ranks of a training start late")
        elif not value.isdigit() or not low <= int(value) <= high:
            yield Finding(name, WARNING, value, f"a number from {low} to {high}")
    noset = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    ids = [part.strip() for part in values.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if values.get(noset) and ids and ids != [str(i) for i in range(len(ids))]:
        yield Finding(noset, WARNING, f"set, with the subset {','.join(ids)}",
                      "unset it: verl takes physical ids for indices (verl pull request 7507)")
    if any(not part for part in values.get("PYTHONPATH", ".").split(":")):
        yield Finding("PYTHONPATH", NOTE, "has an empty part", "it means the current directory: remove stray colons")
    if values.get("ESGRPO_STRICT") == "0":
        yield Finding("ESGRPO_STRICT", WARNING, "0", "unset it: missing hooks do not stop a run")
    if values.get("ESGRPO_DISABLE"):
        yield Finding("ESGRPO_DISABLE", WARNING, values["ESGRPO_DISABLE"], "unset it: these hooks stay off")


def hooks(states: Callable[[], list[dict]]) -> Iterator[Finding]:
    """States as `esgrpo status` shows them; what differs from the tested source stops a strict run that needs it."""
    rows = states()
    for state, level in ((State.DRIFTED, ERROR), (State.FAILED, ERROR), (State.INCOMPATIBLE, WARNING)):
        bad = [row for row in rows if row["state"] == state.value]
        if bad:
            slugs = ", ".join(row["slug"] for row in bad)
            yield Finding("hooks", level, f"{state.value}: {slugs} ({bad[0]['reason']})",
                          "esgrpo status lists all; esgrpo drift says what changed")
    counts = {state: sum(row["state"] == state for row in rows) for state in sorted({row["state"] for row in rows})}
    yield Finding("hooks", OK, "with every feature on: " + ", ".join(f"{n} {state}" for state, n in counts.items()))


RULES = (python, tested, ascend_stack, cann, devices, collectives, log_probs, compiler, libstdcxx, megatron, variables)


def check(env: Environment, states: Callable[[], list[dict]]) -> list[Finding]:
    """All findings, in the order of RULES."""
    found = []
    for rule, subject in (*((rule, env) for rule in RULES), (hooks, states)):
        try:
            found += rule(subject)
        except Exception as error:  # a broken installation must not stop the doctor
            found.append(Finding(rule.__name__, ERROR, f"could not be checked: {type(error).__name__}: {error}",
                                 "repair what it names, or report this"))
    return found


def exit_code(findings: list[Finding]) -> int:
    """By the worst finding: 0 ok and notes, 1 warnings, 2 errors."""
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return max(0, worst - LEVELS.index(NOTE))
