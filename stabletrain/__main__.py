"""`python -m stabletrain` is the command `stabletrain`; torchrun starts it as `-m stabletrain train`."""

import sys

from stabletrain.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
