"""What several benchmarks need; nothing here is a command.

arm.py, stack.py             a run of verl on the testbed: its command line, started, watched, stopped, cleaned up
shared_gpu.py                weight sync where trainer and replicas share one GPU
modules.py                   the overrides that switch on each module alone, and all
training.py                  the runs of a comparison, one by one or side by side, and what is written of them
compare.py                   numbers of finished runs
workload.py, ledger.py       prompts and responses of rollout benchmarks, and where every decoded token went
scripted_scheduler.py        vLLM's scheduler without an engine
gains.py, replayed.py        numbers of the READMEs, from the records: of runs, of replays and simulations
swapped_classes.py           arms of one object: what is timed, and intervals
console.py, provenance.py    what a benchmark says, and what stands beside its numbers
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "bench" / "testbed"
