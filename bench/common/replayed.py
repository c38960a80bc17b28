"""What the front page says of replays and simulations, from their records; gains.py has what is said of runs."""

from __future__ import annotations

import json
import statistics

from bench.common import ROOT

RESULTS = ROOT / "bench" / "results"
VERDICTS, OVERLAP, LOOPS = "verdict_replayed.json", "overlap_simulated.json", "loops_corpus.json"


def numbers() -> dict[str, str]:
    verdicts, overlap, loops = (json.loads((RESULTS / name).read_text()) for name in (VERDICTS, OVERLAP, LOOPS))
    saved = {task: statistics.mean(one["learned"]["tokens_saved"] for one in verdicts["tasks"][task].values())
             for task in ("search", "chain")}
    against = [case["against_best_fixed"] for case in overlap["cases"]]
    return {**{f"replayed_{task}": f"{share:.0%}".replace("%", " %") for task, share in saved.items()},
            "simulated_control": f"{min(against):.2f} … {max(against):.2f}",
            "simulated_cases": str(len({case["name"] for case in overlap["cases"]})),
            "simulated_seeds": str(len(overlap["seeds"])),
            "loops_false": str(loops["false_prunes"]), "loops_placements": f"{loops['placements']:,}"}
