"""INTERIM, to be replaced."""
def position(step, skipped):
    return step
