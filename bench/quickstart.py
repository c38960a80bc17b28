"""Plain fully-async GRPO, then the same with the profile `elastic`; a table, a PNG, a page.

Called by bench/quickstart.sh, which prepares the environment. A single-seed demo, not a benchmark. --model smollm2
trains SmolLM2-135M-Instruct on a task of reasoning-gym instead of the testbed's tiny model: two cores make a few
optimiser steps of it in minutes, which show that all of it works on a real model, and no more.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from bench.common import ROOT, arm, compare, console, scales, stack
from bench.common.arm_values import Arm
from bench.common.console import print_table, say
from bench.common.modules import SEGMENT_LENGTH, switches
from bench.common.provenance import commit, cpu_model
from bench.testbed import make_data
from esgrpo.arguments import Parser
from esgrpo.tools.report import main as write_page
from esgrpo.tools.report import plots
from esgrpo.tools.report.training_figures import comparison_panels

TASK = "search"
PRETRAINED_TASK, PRETRAINED_STEP = "gcd", {"batch": 4, "group": 4}  # short answers; a quarter of the testbed's step
MINIMUM_STEPS = {"testbed": 30, scales.SMOLLM2: 1}
TRAINING_PROMPTS = 2048

PLAIN = switches("observe")
# One run over another, of the same arm: three seeds of overlay over plain lay between 0.77 and 1.13 (ablation_*.json).
TOLD_APART = 1.3
COMPARED_STEPS = 10  # of either arm; a few groups of prompts decide what fewer say
NOTHING_HERE = "{} cores show that all of it works, not what it brings; on GPUs: docs/results.md, Training on two H200s"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="bench/quickstart.sh", description=__doc__)
    parser.add_argument("--budget", type=console.positive, default=300.0, help="wall seconds per arm after start-up")
    parser.add_argument("--seed", type=console.whole, default=1)
    parser.add_argument("--model", choices=("testbed", scales.SMOLLM2), default="testbed",
                        help=f"{scales.SMOLLM2}: SmolLM2-135M-Instruct, made once in runs/pretrained (300 MB)")
    parser.add_argument("--out", type=console.output_folder,
                        help="default: runs/quickstart, with -smollm2 behind it for that model")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    pretrained = options.model == scales.SMOLLM2
    options.task = PRETRAINED_TASK if pretrained else TASK
    options.target = compare.target_of(parser, options.task, options.target, options.model if pretrained else "small")
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    out = (options.out or ROOT / "runs" / ("quickstart-smollm2" if pretrained else "quickstart")).resolve()
    results = []
    try:
        common, segment = pretrained_run(options) if pretrained else testbed_run(options, out)
        own_switches = switches("profile=elastic", f"segment_length={segment}")  # a boundary must lie in a response
        difference = ["plain:   " + " ".join(PLAIN), "overlay: " + " ".join(own_switches)]
        say("both arms run the same command and the same wall-time budget; they differ in:")
        print("\n".join("  " + line for line in difference), flush=True)
        for name, own in (("plain", PLAIN), ("overlay", own_switches)):
            run_dir = out / name
            shutil.rmtree(run_dir, ignore_errors=True)
            overrides = [o.replace("RUN_DIR", str(run_dir)) for o in common] + own
            arm.run(name, overrides, run_dir, ROOT / "overlay", budget_s=options.budget, say=say)
            results.append(compare.load(run_dir, options.target))
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended")
        return 130
    except RuntimeError as error:
        print(f"esgrpo: quickstart: {error}", file=sys.stderr)
        return 1
    return report(results, out, options, difference)


def testbed_run(options, out: Path) -> tuple[list[str], int]:
    """verl's command line for both arms, and the segment length in tokens; makes the data."""
    data = out / "data"
    make_data.write(TASK, options.seed, {"train": TRAINING_PROMPTS, "val": stack.VALIDATION_PROMPTS}, data)
    return stack.common_overrides(data, options.seed), SEGMENT_LENGTH


def pretrained_run(options) -> tuple[list[str], int]:
    """As testbed_run, of the pre-trained model, which is made where it is missing. Raises RuntimeError."""
    data = scales.make_pretrained(scales.PRETRAINED, PRETRAINED_TASK)
    plan = scales.plan(scales.SMOLLM2, **PRETRAINED_STEP, model=scales.PRETRAINED / "model")
    return scales.shared(plan, options.seed, data, Path("RUN_DIR"), Arm("", "off")), plan.segment


def against_plain(plain: compare.Result, overlay: compare.Result) -> tuple[list[str], bool]:
    """The table's last row, and whether it shows a gain that is more than the difference of two runs of one arm."""
    def times(ours: float | None, theirs: float | None) -> float | None:
        return ours / theirs if ours and theirs else None

    speed = times(overlay.effective_per_s, plain.effective_per_s)
    wait = times(overlay.time_to_target, plain.time_to_target)
    said = [f"{value:.2f} times its {what}" for what, value in (("effective tokens/s", speed), ("time to target", wait))
            if value is not None]
    gains = [gain for gain in (speed, times(1.0, wait)) if gain is not None]
    if min(plain.steps, overlay.steps) < COMPARED_STEPS:
        return ["against plain", "", "; ".join([*said, f"{plain.steps} and {overlay.steps} optimiser steps are too few "
                                                       "to tell it from chance"])], False
    better = any(gain > TOLD_APART for gain in gains)
    worse = any(gain < 1 / TOLD_APART for gain in gains)
    verdict = ("more than two runs of one arm differ by" if better or worse else
               f"nothing that one seed tells from chance (factors below {TOLD_APART})")
    return ["against plain", "", "; ".join([*said, verdict])], better and not worse


def afterwards(out: Path) -> list[str]:
    """What a reader can do now in this environment."""
    def near(path: Path) -> str:
        return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)

    scripts = Path(sys.executable).parent
    return [f"{near(scripts / 'esgrpo')} status {near(out)}: the hooks of both runs, and what each module decided",
            f"every `python -m bench.…` of the documents: {near(scripts / 'python')} -m bench.…, in {ROOT}"]


def report(results, out: Path, options, difference: list[str]) -> int:
    row, gained = against_plain(*results)
    rows = [*compare.table(results), row]
    notes = [f"single-seed demo, seed {options.seed}, {options.budget:.0f} s per arm, task '{options.task}', "
             f"{time.strftime('%Y-%m-%d')}; target of both arms: a held-out reward of {options.target}",
             f"{platform.machine()}, {cpu_model()}, Python {platform.python_version()}",
             "one trainer and one rollout replica on the CPU; capacity of the bubble rate is max_num_seqs",
             "memory of all processes at its peak: " + ", ".join(f"{r.name} {r.peak_bytes / 1e9:.1f} GB"
                                                                  for r in results if r.peak_bytes),
             *([] if gained else [NOTHING_HERE.format(os.cpu_count())])]
    print()
    for note in notes:
        print(note)
    print()
    print_table(rows)
    record = {"command": shlex.join(["bash", "bench/quickstart.sh", *sys.argv[1:]]), "commit": commit(),
              "seed": options.seed, "target": options.target, "device": notes[1], "notes": notes,
              "difference": difference, "table": rows,
              "curves": {r.name: r.curves for r in results},
              "hooks": json.loads((out / "overlay" / "esgrpo" / "hooks.json").read_text())}
    (out / "table.json").write_text(json.dumps(record, indent=1))
    plots.save_png(lambda axes: comparison_panels(axes, {r.name: [r.curves] for r in results}), out / "quickstart.png")
    write_page(str(out), str(out / "quickstart.html"))
    print()
    say(f"picture {out / 'quickstart.png'}, page {out / 'quickstart.html'}, records in {out}")
    for line in afterwards(out):
        say(line)
    least = MINIMUM_STEPS[options.model]
    if options.model == scales.SMOLLM2:
        steps = " and ".join(f"{r.steps} ({r.name})" for r in results)
        say(f"{steps} optimiser steps in {options.budget:.0f} s each: too few for a reward to say anything; on GPUs: "
            "python -m bench.train --model smollm2")
    short = [r.name for r in results if r.steps < least]
    if short:
        say(f"fewer than {least} optimiser steps in: {', '.join(short)}; give a larger --budget")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
