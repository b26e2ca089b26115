"""The machine: card and build of PyTorch, determinism, compilation, memory, signals, Slurm."""
