"""Simulation of rollout: a virtual clock drives bench.policies, and so the real algo/, against replicas that follow a
measured time per decode step. Standard library only. Everything it prints is simulated and says so."""
