"""Several runs from one command, on this machine."""
