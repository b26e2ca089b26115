"""Reads a job's script."""


def options(script):
    """Returns the `#SBATCH` options of a script, name to value."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}
