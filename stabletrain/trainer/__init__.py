"""Builds a run and decides when a step is computed, judged, logged, evaluated, saved or undone."""
