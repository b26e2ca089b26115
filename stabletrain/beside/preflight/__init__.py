"""Preflight: proves before the first step what is wrong with a training loop and would never make a NaN.

| file | |
|---|---|
| finding | what a check says: verdict, number, line, fix |
| loop | what the checks are given of a loop, and how a fresh one is made |
| state | everything that training changes in a loop, by name, and its random states |
| recording | a few steps of a loop, with everything that they call |
| structure, network, untrained | parameters and groups; the model by itself; parameters without gradient |
| order, loss_scale, schedulers | old gradients; the loss scale; the learning rate |
| tracing | what the loss makes of its batch |
| plain | a loop without compilation, recomputation, autocast or dropout, or in fp64 |
| functions | autograd functions of the user's, each alone |
| checks | all checks, in their order, and `check_loop` |
| report | what all checks say, on the terminal and as JSON |
| own_run | the loop of a configured run |
| first_step | `check=first_step`, in a run |
| command | `stabletrain check` |
| script, while_scaled | what is said of a script that was watched, and of its loss scale |
"""
