"""A script that trains nothing; its first argument chooses how it ends."""

import atexit
import sys


def fail():
    raise ValueError("the script's own")


if __name__ == "__main__":
    atexit.register(print, "at exit")
    print(sys.argv, sys.path[0], __file__, __name__, __spec__ is None, sys.stdin.read(), "torch" in sys.modules)
    if sys.argv[1] == "text":
        raise SystemExit("text")
    if sys.argv[1] == "error":
        try:
            fail()
        except ValueError as error:
            raise RuntimeError("outer") from error
    if sys.argv[1] == "interrupt":
        raise KeyboardInterrupt
