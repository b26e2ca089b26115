"""Jobs on a Slurm cluster: what they ask for, which are submitted, what they have used."""
