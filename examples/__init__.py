"""Scripts and models that use the package. A package of its own, so that no other `examples` takes its name."""
