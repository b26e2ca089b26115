"""From a command line to jobs of a Slurm cluster; run by `slurm/launch.sh`."""
