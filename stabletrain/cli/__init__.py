"""The commands of one run: `train`, `prepare`, `sample`, `diagnose`, `replay`."""
