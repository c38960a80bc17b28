"""The weight sync: what becomes of running requests."""
