"""`stabletrain run script.py [args]`: guards whatever a training script trains, or checks it, without a changed line.

| file | |
|---|---|
| command | the command: runs a script as `python script.py` does, with its exit code and its tracebacks |
| start | begins to watch a process as soon as it imports torch, and the processes that it spawns; notebooks |
| watch | notices optimizers and loss scalers when they are made, and attaches a guard to each |
| model | finds the model of an optimizer where the script calls no module that holds all of its parameters |
| check, recorder | `--check`: records the first updates, has them checked, and ends the script |
| updates | what is left if a guard cannot be attached: updates that are not finite are undone |
"""
