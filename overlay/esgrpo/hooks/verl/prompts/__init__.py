"""Which prompts start when, what is remembered of them, and what comes back after a restart."""
