"""Writes what happened: metrics.jsonl, run.json, W&B, and the progress bar."""
