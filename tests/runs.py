"""Runs for the tests: the benchmarks' small ones, and one with every group that acts switched off."""

from benchmarks.runs import CONF, ROOT, TINY_GPT, TINY_RESNET, command, composed

__all__ = ["CONF", "OFF", "ROOT", "TINY_GPT", "TINY_RESNET", "command", "composed"]

OFF = [
    "precision=fp32",
    "clipping=none",
    "warmup=none",
    "schedule=constant",
    "zloss=none",
    "qknorm=none",
    "softcap=none",
    "init=torch",
    "determinism=off",
    "guard=off",
    "checkpoint=off",
]
"""Every group that acts, switched off."""
