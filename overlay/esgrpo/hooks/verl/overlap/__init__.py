"""How far rollout and training overlap: settings of the fully-async loop that are moved while it runs."""
