"""Benchmarks. What can be run: every module right here, bench.engine and bench.sim with their modules that say so.

common/    what they share         policies/  policies of ES-GRPO and of its rivals, played by engine/ and sim/
testbed/   task, model and data    recipes/   launch scripts of real models        results/  records and their report
"""
