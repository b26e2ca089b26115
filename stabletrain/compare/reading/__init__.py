"""From run folders to runs: whole, running, broken or empty, ten thousand in a minute."""
