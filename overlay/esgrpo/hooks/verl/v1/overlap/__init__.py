"""How far rollout and training overlap in verl's v1 trainer `separate_async`: what is moved while it runs."""
