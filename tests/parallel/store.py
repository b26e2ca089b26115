"""The store in which ranks find each other, in a process of its own: it outlives every rank, as torchrun's does.

python -m tests.parallel.store FILE      writes its port to FILE, and serves until it is killed
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    file = Path(sys.argv[1])
    temporary = file.with_suffix(".tmp")
    temporary.write_text(str(store.port))
    os.replace(temporary, file)
    signal.pause()
