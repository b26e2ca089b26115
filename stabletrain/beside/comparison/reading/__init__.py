"""Reads run folders, whether the run is complete, running, broken or empty."""
