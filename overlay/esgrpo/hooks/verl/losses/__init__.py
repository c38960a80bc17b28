"""Advantages and policy losses."""
