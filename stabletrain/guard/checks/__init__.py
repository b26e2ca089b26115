"""Self-checks of a step: faults that leave no NaN in its numbers, and updates that are not finite.

| file | |
|---|---|
| state_check | weights, moments and buffers are what the last update left |
| recheck | a gradient and an update, computed a second time, give the same bits, or nearly the same |
| repeats, comparing | the second computation, and how far its results differ |
| update_check | an update is finite, or it is undone |
| written, copies | everything that an optimizer's step may write, and copies of it |
"""
