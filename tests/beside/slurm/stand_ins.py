"""Scripts that replace a cluster's programs."""


def stand_in(place, name, body):
    """Writes an executable script of this name to `place`."""
    file = place / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)
