"""Checks of a step: whether the state is what the last update left, and whether a computation repeats exactly."""
