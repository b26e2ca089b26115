"""`python -m stabletrain` is the command `stabletrain`; torchrun starts it as `-m stabletrain train`."""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules in the working folder first. No code is run from inside a run or an incident.
    inside = ("run.json", ".hydra", "sweep.json", "multirun.yaml", "diagnosis.json", "step.json")
    if sys.path[0] == os.getcwd() and any(os.path.exists(name) for name in inside):
        del sys.path[0]
    from stabletrain.cli.commands import main

    sys.exit(main())
