"""Weights from elsewhere, with which a run begins: which files, and how they fit the model."""
