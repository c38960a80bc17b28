"""Faults of verl itself, each with the condition under which its cure goes."""
