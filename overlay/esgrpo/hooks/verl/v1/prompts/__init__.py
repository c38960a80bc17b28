"""Prompts and groups of verl's v1 trainers."""
