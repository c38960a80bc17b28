"""Finished samples between verl's rollouter and its trainer."""
