"""`esgrpo explain`: what a metric means, what it should be, and what to change; metrics.toml has the answers."""
