"""The whole state of a run in memory and on disk: captured, written in the background, verified, restored."""
