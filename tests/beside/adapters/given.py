"""Sizes of what the libraries train on in these tests."""

STEPS = 6
SIZE = 8
MARK = 0.125
"""First value of a sample whose logits are large."""
