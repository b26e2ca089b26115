"""Measures norms, activations, attention and curvature while the model trains; changes nothing."""
