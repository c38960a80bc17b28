"""A group of responses in an agent-loop worker, from its first attempt to its rows."""
