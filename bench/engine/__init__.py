"""Policies on real vLLM replicas: `python -m bench.engine` compares them, `python -m bench.engine.tau` measures tau(b).

    __main__.py   options, the order of the runs, the results file
    driver.py     one run: a policy of bench.policies decides, the replicas decode, the driver owns the clock
    measures.py   what a run reports: makespan, bubble with causes, waste, and the books that must agree
    fleet.py      N replica processes on the visible devices, started once, hooks checked
    replica.py    one process with vLLM's EngineCore and the overlay's scheduler hook
    tau.py        milliseconds per decode step at batch b, and the prefill rate
    model.py      a Qwen2 of a given size with random weights, nothing downloaded
"""
