"""Healthy programs of many kinds, in loops of their own: no step may be withheld.

    python -m tests.reliability.healthy
    python -m tests.reliability.healthy --only wgan gan --seeds 3

Each program is a small training loop as people write it, with data made on the spot. It takes the number of steps of
all its networks together, and a function that makes a `Guard` of a model and an optimizer.
"""
