"""Programs that stand in for those of a cluster."""


def stand_in(place, name, body):
    """A program of this name in `place`."""
    file = place / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)
