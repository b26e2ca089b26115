"""Self-checks of a step."""
