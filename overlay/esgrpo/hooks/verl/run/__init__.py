"""The start of a run, the answer of each of its processes, and its end."""
