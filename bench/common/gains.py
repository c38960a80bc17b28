"""What was gained, computed from the records: the tables of docs/results.md, and the numbers of the front page's.

The words are those of gains.toml; every number in them is read from bench/results when the page is made, so that a
record that changes makes the page stale (python -m bench.docs --check). Training runs are pooled where hardware, model,
task, staleness and the overlay's switches are the same; ratios are within a pair of one seed and one record.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.common import records
from bench.common.records import side_by_side, span, spread, training_pairs
from esgrpo import compat

USEFUL = "groups with gradient/s"
FRESH = "fresh tokens/s"  # each token weighs less with its age
WITH_TEXT = "train_h200.json"  # before there were token outputs
# two H200s a run, 33 M parameters, staleness 2.0, token_outputs on in the overlay's arm
TRAINING = ("train_h200_staleness.json", "train_h200_two_seeds.json", "train_h200_token_outputs.json")
CPU = ("ablation_search.json", "ablation_chain.json")
V1_CPU = "train_cpu_v1.json"  # separate_async
V1_DAPO = "train_cpu_v1_dapo.json"  # the same with DAPO, verl's own group filter on in both arms
V1_FORESEEN = "train_cpu_v1_foreseen.json"  # places of what it leaves out filled ahead, beside two and three batches
SAMPLER_CPU = "ablation_sampler.json"  # the sampler alone, as it chooses now; the ablations are of an earlier one
# records of overlap control: names of its fixed settings; the second without learning, the third of a later controller
OVERLAP = dict.fromkeys(("overlap_cpu.json", "overlap_cpu_rates.json", "overlap_cpu_third_seed.json"),
                        ("fixed 8, 0.5", "fixed 24, 2"))
OVERLAP_GPU = "train_h100_overlap_cured.json"  # two starts beside two fixed settings, eight runs at once on two H100s
OVERLAP_FOR_SPEED = "train_h200_smollm2_overlap.json"  # the same with age at a quarter of its usual price
CARRIED, ASYNC = ("engine_h200_carry_over.jsonl",), ("engine_h200_async.jsonl",)
# memory for about half of what would run; rivals with headroom, too; four updates, and eight
SEVEN_B = "engine_h200_7b.jsonl"
SEVEN_B_EIGHT = ("engine_h200_7b_three_seeds.jsonl", "engine_h200_7b_eight_updates.jsonl")
# room for all, eight updates; without a barrier; two replicas with scarce memory against Seer
SEVEN_B_AMPLE, SEVEN_B_ASYNC = ("engine_h200_7b_ample.jsonl",), ("engine_h200_7b_async.jsonl",)
SEVEN_B_ROLLPACKER = ("engine_h200_7b_ample_rollpacker.jsonl", "engine_h200_7b_ample_rollpacker_third_seed.jsonl")
LOSSES_GPU, LOSSES_GPU_ONE_STEP = (f"train_h200_smollm2_losses_{kind}.json" for kind in ("2e5", "one_step"))
SEVEN_B_SEER = "engine_h200_7b_seer.jsonl"
BARRIER = ("engine_h200_rivals.jsonl", "engine_h200_sizes.jsonl")
GRID, CARRY_OVER = "robustness_grid.json", "sim_sync.json"
OVERLAP_SIMULATED, LOOPS_CORPUS = "overlap_simulated.json", "loops_corpus.json"
# five and six arms at once on two H200s, longer than TRAINING: the figure's
PARTS, LEFT_OUT = "train_h200_parts.json", "train_h200_left_out.json"
LOOPS = "train_h100_verdicts.json"  # plain and the loop rule alone, three seeds
LENDING = "lending_h200.json"  # kept requests, a lent device, both and neither, two seeds on two H200s
ALL_VERDICTS = "train_h100_all_verdicts.json"  # plain, everything on without them and with them, nine runs at once
PRETRAINED = "train_h200_smollm2.json"  # six runs at once on two H200s
ALIKE = "train_h200_smollm2_alike_2e5.json", "loss_agg_mode=seq-mean-token-mean"  # long answers; in both arms
PRIMES = "train_h200_smollm2_primes.json"  # a family that no earlier run had trained on, of sixteen runs at once six
PRIMES_16 = "train_h200_smollm2_primes_16.json"  # the same with groups of 16, one pair
CHAIN_SUM = "train_h200_smollm2_chain_sum.json"  # short answers, two learning rates, four runs at once on one H200
# the same with eight times as many prompts, none of which came back; three pairs at once on two H100s
FRESH_PROMPTS = "train_h100_smollm2_chain_sum.json"
# and with the group filter, eight runs; the filter on a CPU
FILTER, FILTER_CPU = "train_h100_smollm2_left_out.json", "ablation_filter_all.json"
ALONE = "train_h200_smollm2_alone.json"
# the same with later profiles, two and three pairs each: name of the numbers -> record, values of both arms
SUMS = {"sums": ("train_h200_smollm2_sums.json", ""), "sums_dapo": ("train_h200_smollm2_sums_dapo.json", ""),
        "sums_v1": ("train_h200_smollm2_sums_v1_filter.json", " filter_groups=on")}  # v1's separate_async
# v1 against plain with its own filter and three batches ahead, beside the first of SUMS
V1_THREE, V1_THREE_ARM = "train_h200_smollm2_sums_v1_foreseen.json", "plain filter_groups=on warmup=3"
# and four, the best verl that was tried, beside one part after the other left out of everything on
V1_FOUR, V1_FOUR_ARM = "train_h200_smollm2_sums_v1_four_ahead.json", "plain filter_groups=on warmup=4"
V1_SIX, V1_SIX_ARM = "train_h200_smollm2_sums_v1_six_ahead.json", "plain filter_groups=on warmup=6"  # and six
SUMS_LEFT_OUT = "train_h200_smollm2_sums_left_out.json"
SEGMENTS, WARM = "train_h200_smollm2_segments.json", "train_h200_smollm2_history.json"
ENGLISH, CHINESE = "en", "zh"
FIRST, LAST, LATER = (f"held-out reward, {when}" for when in ("first", "last", "later half"))
TOKENS, AGE = "decoded tokens per group with gradient", "age of a trained token, later half, versions"


def _against(other: str, names=BARRIER) -> list[float]:
    """How many times as fast per update as another policy, for every command that played both."""
    return [found[other]["s_per_update"] / found["es-grpo"]["s_per_update"]
            for name in names for found in records.engine(name).values() if {other, "es-grpo"} <= found.keys()]


def _stale(policy: str, names) -> str:
    """Share of the trained rows that hold tokens of older weights, over the runs that played `policy`."""
    shares = [found[policy]["versions_old"]["rows"]["share"]
              for name in names for found in records.engine(name).values() if policy in found]
    return f"{min(shares):.0%} … {max(shares):.0%}"


def _seven_b() -> dict[str, str]:
    """One replica of 7 B with scarce memory: ES-GRPO with headroom against the others, and against itself without."""
    four, ours = [*records.engine(SEVEN_B).values()], "es-grpo@0.05"
    eight = [found for name in SEVEN_B_EIGHT for found in records.engine(name).values()]

    def of(policy: str, measure, among) -> list[float]:
        return [measure(found[policy]) for found in among if policy in found]

    def times(policy: str, among) -> list[float]:
        return [found[policy]["s_per_update"] / found[ours]["s_per_update"] for found in among if policy in found]

    stale = of(ours, lambda run: run["versions_old"]["rows"]["share"], four + eight)
    roll4, = times("rollpacker@0.05", four)
    seer = [*records.engine(SEVEN_B_SEER).values()]
    ample, free = _against("colocate_async", SEVEN_B_AMPLE), _against("verl", SEVEN_B_ASYNC)
    return {"own7": span(times("colocate_async@0.05", eight)), "april7": span(times("april@0.05", eight)),
            "roll7": f"{roll4:.2f}", "roll8": span(times("rollpacker@0.05", eight)),
            "barrier7": spread(times("verl@0.05", eight)).partition(" ")[0],
            "seer7": span(times("seer@0.05", seer)), "seer_runs7": str(len(seer)),
            "ample7": span(ample), "ample_runs7": str(len(ample)), "ample_stale7": _stale("es-grpo", SEVEN_B_AMPLE),
            "ample_roll7": span(_against("rollpacker", SEVEN_B_ROLLPACKER)),
            "ample_barrier7": span(_against("verl", SEVEN_B_ROLLPACKER)),
            "async7": span(free), "async_runs7": str(len(free)),
            "headroom": span(times("es-grpo", four)), "runs7": str(len(four)),
            "runs8": str(len({found[ours]["seed"] for found in eight})),
            "stale7": f"{min(stale):.0%} … {max(stale):.0%}",
            "preempted": span(of(ours, lambda run: run["preemptions"], four), 0),
            "preempted_without": span(of("es-grpo", lambda run: run["preemptions"], four), 0)}


def _simulated(setting: str, policy: str = "es-grpo") -> dict:
    record = records.read(CARRY_OVER)
    return next(row for row in record["sync"][setting] if row["policy"] == policy)["updates"]


def _range(found: dict) -> str:
    return f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _grid() -> list[float]:
    """Held-out reward at the end, less plain's: the median of every setting."""
    head, *rows = records.read(GRID)["table"]
    at = head.index("held-out reward, end, less plain")
    cells = [re.match(r"[+-]?[\d.]+", row[at]) for row in rows if row[head.index("arm")] != "plain"]
    return [float(cell[0]) for cell in cells if cell]


def _arms(name: str) -> dict[str, dict]:
    """Arm -> measures, of a record of one seed."""
    record = records.read(name)
    return {arm: next(iter(seeds.values())) for arm, seeds in record["measures"].items()}


def _kept() -> dict[str, str]:
    """Groups with a gradient a second of everything on, and of the same without kept requests, times plain's."""
    arms = _arms(LEFT_OUT)
    return {name: f"{arms[arm][USEFUL] / arms['plain'][USEFUL]:.2f}"
            for name, arm in (("all_groups", "overlay"), ("no_keep_groups", "all without keep"))}


def _longer() -> dict[str, str]:
    """The two longer pairs of the first row's model: effective tokens/s beside groups, which flatter less."""
    pairs = training_pairs((PARTS, LEFT_OUT))
    return {"longer_effective": span(pair.ratio("effective tokens/s") for pair in pairs),
            "longer_useful": span(pair.ratio(USEFUL) for pair in pairs)}


def _syncs() -> dict[str, str]:
    """Seconds of a weight sync, times plain's, where runs share their GPUs; and without token outputs."""
    key = "verl's step, weight sync, s"
    crowded = [*training_pairs((PRETRAINED, PRIMES)), *training_pairs((ALL_VERDICTS,), overlay="all verdicts")]
    return {"sync_crowded": span(pair.ratio(key) for pair in crowded),
            "sync_with_text": span(pair.ratio(key) for pair in training_pairs((WITH_TEXT,)))}


def _verdicts() -> dict[str, str]:
    """Of everything on with learned verdicts, beside plain runs and the same without them; of the loop rule alone."""
    beside, now = (training_pairs((ALL_VERDICTS,), arm, "all verdicts") for arm in ("all", "plain"))
    alone = training_pairs((LOOPS,), "plain", "C loops")
    without = training_pairs((ALL_VERDICTS,), "plain", "all")
    per_group = "decoded tokens per group with gradient"
    rewards = [*zip(*(pair.first_rewards() for pair in now), strict=True)]
    times = [curve["evaluations"][1][0] for pair in now for curve in pair.curves]
    return {"loops_times": spread(pair.ratio("effective tokens/s") for pair in alone),
            "loops_useful": spread(pair.ratio(USEFUL) for pair in alone), "verdict_seeds": str(len(alone)),
            "verdict_long_seeds": str(len(beside)),
            "verdict_long_tokens": spread(pair.ratio(per_group) for pair in beside),
            "verdict_long_useful": spread(pair.ratio(USEFUL) for pair in beside),
            "now_reward": spread(rewards[1]), "now_reward_plain": spread(rewards[0]), "now_at": span(times, 0),
            "now_without": spread(pair.ratio("effective tokens/s") for pair in without),
            "now_useful": spread(pair.ratio(USEFUL) for pair in now),
            "now_effective": spread(pair.ratio("effective tokens/s") for pair in now),
            "now_verdicts": spread((pair.overlay["decisions: verdicts"] for pair in now), 0)}


def _useful(record: str, arm: str, other: str) -> str:
    """How many times the groups with a gradient a second of another arm, over the seeds."""
    return spread(pair.ratio(USEFUL) for pair in training_pairs((record,), other, arm))


def _pretrained() -> dict[str, str]:
    """Of the runs on SmolLM2: long answers, then short ones, then the held-out family."""
    long, short = training_pairs((PRETRAINED,)), training_pairs((FRESH_PROMPTS,), overlay="all")
    primes, sixteen = training_pairs((PRIMES,)), training_pairs((PRIMES_16,))[0]
    today, = training_pairs((SEGMENTS,), overlay="all")
    alike = training_pairs(ALIKE[:1], *(f"{arm} {ALIKE[1]}" for arm in ("plain", "all")))
    kinds, few = {"real": long, "alike": alike, "new": short, "primes": primes}, _arms(CHAIN_SUM)

    def lost(arm: str) -> str:
        run = few[f"{arm} lr=5e-5"]
        return f"{run[FIRST]:.2f} → {run[LATER]:.2f}"

    return {**{f"{name}_{key}": value for name, pairs in kinds.items() for key, value in {
                "useful": spread(pair.ratio(USEFUL) for pair in pairs),
                "first": spread(run[FIRST] for pair in pairs for run in (pair.plain, pair.overlay)),
                "reward": spread(pair.overlay[LAST] for pair in pairs),
                "reward_plain": spread(pair.plain[LAST] for pair in pairs)}.items()},
            "segments_static": span(pair.ratio(USEFUL) for pair in training_pairs((SEGMENTS,), overlay="B yield")),
            "segments_all": f"{today.ratio(USEFUL):.2f}",
            "segments_verdicts": f"{today.overlay['decisions: verdicts']}",
            "real_pairs": str(len(long)), "alike_pairs": str(len(alike)), "primes_pairs": str(len(primes)),
            "alike_tokens": spread(pair.ratio(TOKENS) for pair in alike),
            "alike_verdicts": span((pair.overlay["decisions: verdicts"] for pair in alike), 0),
            "primes_verdicts": span((pair.overlay["decisions: verdicts"] for pair in primes), 0),
            "sixteen_useful": f"{sixteen.ratio(USEFUL):.2f}",
            "chain_lost": lost("all verdicts"), "chain_lost_plain": lost("plain")}


def _sums() -> dict[str, str]:
    """The same model on sums as the profile is now: against plain, against v1 tuned, and with one part left out."""
    sums = training_pairs((SUMS["sums"][0],), overlay="all")
    best = side_by_side((SUMS_LEFT_OUT, "all"), (V1_FOUR, V1_FOUR_ARM))
    three = [pair for ours, theirs in ((SUMS["sums"][0], V1_THREE), (SUMS_LEFT_OUT, V1_FOUR))
             for pair in side_by_side((ours, "all"), (theirs, V1_THREE_ARM))]

    def of_all(record: str, arm: str) -> str:
        """Last rewards of an arm, those without a partner, too."""
        return spread(run[LAST] for run in records.read(record)["measures"][arm].values())

    return {**{f"{name}_{key}": value for name, (record, own) in SUMS.items() for key, value in {
                "useful": _useful(record, f"all{own}", f"plain{own}"), "reward": of_all(record, f"all{own}"),
                "reward_plain": of_all(record, f"plain{own}")}.items()},
            "sums_pairs": str(len(sums)),
            "sums_first": span(run[FIRST] for pair in sums for run in (pair.plain, pair.overlay)),
            **{f"{name}_{key}": value for name, pairs in (("best", best), ("three", three)) for key, value in {
                "useful": span(pair.ratio(USEFUL) for pair in pairs),
                "tokens": span(pair.ratio(TOKENS) for pair in pairs),
                "reward": span(pair.overlay[LAST] for pair in pairs),
                "reward_plain": span(pair.plain[LAST] for pair in pairs),
                "age": span((pair.overlay[AGE] for pair in pairs), 1),
                "age_plain": span((pair.plain[AGE] for pair in pairs), 1)}.items()},
            **{name: span(pair.ratio(USEFUL) for pair in training_pairs(found, arm, "all filter_groups=on"))
               for name, found, arm in (("tuned_six", (V1_SIX,), V1_SIX_ARM),
                                        ("tuned_four", (V1_FOUR, V1_SIX), V1_FOUR_ARM),
                                        ("tuned_useful", (V1_THREE, V1_FOUR), V1_THREE_ARM))},
            **{name: span(pair.ratio(key) for pair in training_pairs((WARM,), "all", "all history=warm"))
               for name, key in (("warm_useful", USEFUL), ("warm_tokens", TOKENS))},
            **{f"without_{part}": span(pair.ratio(key) for pair in training_pairs(
                (SUMS_LEFT_OUT,), "all", f"all without {part.partition('_')[0]}"))
               for part, key in (("filter", USEFUL), ("sampler", USEFUL), ("sampler_tokens", TOKENS),
                                 ("verdicts", USEFUL))}}


def _filters() -> dict[str, str]:
    """The group filter alone and beside the rest, on GPUs and on a CPU."""
    return {"spare_useful": _useful(FILTER, "all spare", "all"), "spare_alone": _useful(ALONE, "C spare", "plain"),
            "ahead_tuned": _useful(V1_FORESEEN, "all", "plain warmup=3"),
            "spare_useful_cpu": _useful(FILTER_CPU, "all spare staleness=2", "all staleness=2")}


def _v1() -> dict[str, str]:
    """v1's separate_async on a CPU, everything on against plain."""
    return {name: spread(pair.ratio("effective tokens/s") for pair in training_pairs((record,), "plain", "all"))
            for name, record in (("v1_effective", V1_CPU), ("v1_dapo_effective", V1_DAPO))}


def texts() -> dict:
    return compat.toml(Path(__file__).with_suffix(".toml"))


def numbers() -> dict[str, str]:
    """Everything the table prints."""
    pairs = training_pairs(TRAINING)
    over = {key: [getattr(pair, side)[key] for pair in pairs] for side, key in (
        ("overlay", "verl's step, weight sync, s"), ("overlay", "held-out reward, last"))}
    plain = {key: [pair.plain[key] for pair in pairs] for key in (
        "verl's step, weight sync, s", "waste reprefill", "held-out reward, last")}
    math_, code = _simulated("24 updates, 4 replicas"), _simulated("24 updates, 4 replicas, code")
    cpu = {name: [pair.ratio("effective tokens/s") for pair in training_pairs((name,), "off", "all")] for name in CPU}
    grid, april = _grid(), _against("april", CARRIED + BARRIER)
    return {
        "pairs": str(len(pairs)), "effective": spread(pair.ratio("effective tokens/s") for pair in pairs),
        "decoded": spread(pair.ratio("decoded tokens/s") for pair in pairs),
        "sync": spread(over["verl's step, weight sync, s"]), "sync_plain": spread(plain["verl's step, weight sync, s"]),
        "reprefill": f"{max(pair.overlay['waste reprefill'] for pair in pairs):.0%}",
        "reprefill_plain": f"{min(plain['waste reprefill']):.0%} … {max(plain['waste reprefill']):.0%}",
        "kept": f"{min(pair.overlay['requests kept per sync'] for pair in pairs):.0f} … "
                f"{max(pair.overlay['requests kept per sync'] for pair in pairs):.0f}",
        "reward": spread(over["held-out reward, last"]), "reward_plain": spread(plain["held-out reward, last"]),
        "settings": str(len(grid)), "grid": f"{min(grid):+.3f} … {max(grid):+.3f}",
        "search": spread(cpu[CPU[0]]), "chain": spread(cpu[CPU[1]]), "seeds": str(len(cpu[CPU[0]])),
        "barrier": span(_against("verl")), "barrier_runs": str(len(_against("verl"))), "april": spread(april),
        "april_runs": str(len(april)), "async": spread(_against("verl", ASYNC)),
        "async_runs": str(len(_against("verl", ASYNC))), "april_stale": _stale("april", CARRIED),
        "april_stale_ours": _stale("es-grpo", CARRIED), "simulated": _range(math_), "code": _range(code),
        **_kept(), **_longer(), **_syncs(), **_verdicts(), **_pretrained(), **_sums(), **_filters(), **_seven_b(),
        **_v1()}


def _against_better(half: str, settings: dict[str, tuple[str, ...]]) -> list[float]:
    """Fresh tokens/s of every controlled run, over those of the better one of two fixed settings of its record."""
    found = []
    for record, fixed in settings.items():
        fresh = {name: run[half][FRESH] for name, run in records.read(record)["arms"].items()}
        for name in (name for name in fresh if "controlled" in name):
            rivals = [name.replace("controlled", rival) for rival in fixed]
            if set(rivals) <= set(fresh):
                found.append(fresh[name] / max(fresh[rival] for rival in rivals))
    return found


def _controlled_on_gpus() -> dict[str, str]:
    """Groups with a gradient a second within a seed, to a fixed 4 and to the better one of fixed 2 and 4."""

    def ratios(record: str, *fixed: str) -> str:
        measures = records.read(record)["measures"]
        best = {seed: max(measures[arm][seed][USEFUL] for arm in fixed) for seed in measures[fixed[0]]}
        return span(row[USEFUL] / best[seed] for arm, runs in measures.items() if "overlap" in arm
                    for seed, row in runs.items() if seed in best)

    return {"control_groups_to_4": ratios(OVERLAP_GPU, "all staleness=4"),
            "control_groups_for_speed": ratios(OVERLAP_FOR_SPEED, "all", "all staleness=4")}


def _lending() -> dict[str, str]:
    """Decoded tokens/s of kept requests beside a lent device, times those of lending alone."""
    arms = (f"{requests} staleness=1 steps=2 dynamic=on" for requests in ("plain", "keep"))
    return {"lent_gpu": span(pair.ratio("decoded tokens/s") for pair in training_pairs((LENDING,), *arms))}


def module_numbers() -> dict[str, str]:
    """Of each module alone on a CPU, and what else the table of modules says."""
    record = records.read(CPU[0])["measures"]
    alone = {arm.split()[-1]: spread(record[arm][seed]["effective tokens/s"] / record["off"][seed]["effective tokens/s"]
                                     for seed in record[arm] if seed in record["off"])
             for arm in ("A routing", "C pruning")}
    alone["sampler"] = spread(pair.ratio("effective tokens/s")
                              for pair in training_pairs((SAMPLER_CPU,), "off", "C sampler"))
    losses = records.read("robustness_losses.json")["table"]
    at = losses[0].index("held-out reward, end, less vanilla")
    less = {row[1].replace(" ", "_"): row[at] for row in losses[1:]}
    control = {half: _against_better(half, OVERLAP) for half in ("before", "after")}
    pairs = training_pairs(TRAINING)
    cpu = "CPU of vLLM's server, us a token"
    return {**alone, **less, **studies(),
            **{f"control_{half}": spread(ratios) for half, ratios in control.items()},
            "control_runs": str(len(control["before"])),
            **_controlled_on_gpus(), **_lending(), **_losses_on_a_gpu(),
            "front": span([pair.overlay[cpu] for pair in pairs], 0),
            "front_plain": span([pair.plain[cpu] for pair in pairs], 0)}


def _losses_on_a_gpu() -> dict[str, str]:
    """Held-out reward of the later half, four optimiser steps a weight version and one, at a learning rate that verl's
    own loss survives."""
    arms = {"default": "plain", "pois": "plain loss=pois", "sais": "plain loss=sais"}
    return {f"{kind}_loss_{name}": span(run[LATER] for run in records.read(record)["measures"][arm + steps].values())
            for kind, record, steps in (("slow", LOSSES_GPU, " steps=4"), ("one", LOSSES_GPU_ONE_STEP, ""))
            for name, arm in arms.items()}


def studies() -> dict[str, str]:
    """Of overlap control in simulation, and of the loop rule on texts that are no loops."""
    overlap, loops = (records.read(name) for name in (OVERLAP_SIMULATED, LOOPS_CORPUS))
    return {"simulated_control": span(case["against_best_fixed"] for case in overlap["cases"]),
            "loops_false": str(loops["false_prunes"]), "loops_placements": f"{loops['placements']:,}"}


def module_table(language: str) -> list[list[str]]:
    """One row a module."""
    found, said = {**numbers(), **module_numbers()}, texts()
    return [said["module_head"][language],
            *([cell.format(**found) for cell in row[language]] for row in said["module"])]


def table(language: str) -> list[list[str]]:
    """Rows of the table, the header first; links are those of a page in docs/."""
    found, said = numbers(), texts()
    rows = [said["head"][language]]
    for row in said["gain"]:
        links = " ".join(f"[{number}](../bench/results/{name})" for number, name in enumerate(row["records"], start=1))
        rows.append([*(cell.format(**found) for cell in row[language]), links])
    return rows


def cost_table(language: str) -> list[list[str]]:
    """What the overlay itself costs; median [95 % bootstrap]. Links as in `table`."""
    scheduler, startup = (records.read(f"{name}.json") for name in ("scheduler_cost", "startup"))
    said = texts()

    def row(text: str, cost: str, against: str, name: str) -> list[str]:
        return [said["cost"][text][language].format(requests=f"{scheduler['requests']:,}"), cost, against,
                f"[{name}.json](../bench/results/{name}.json)"]

    rows, arms = [said["cost_head"][language]], scheduler["async"]["arms"]
    step = f"{arms['plain']['microseconds_per_step']['median']:,.0f} µs"
    for name in (name for name in arms if name in said["cost"]):
        own, (share, low, high) = (arms[name]["own_microseconds_per_step"]["median"],
                                   (f"{arms[name]['own_over_upstream'][at]:.1%}" for at in ("median", "low", "high")))
        rows.append(row(name, f"{own:.0f} µs, {share} [{low}, {high}]", step, "scheduler_cost"))
    more = startup["overhead_ms"]
    rows.append(row("startup", f"{more['median']:.1f} ms [{more['low']:.1f}, {more['high']:.1f}]",
                    f"{startup['baseline_ms']:.0f} ms", "startup"))
    return rows
