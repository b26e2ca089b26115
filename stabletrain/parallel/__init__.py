"""Trains one model with several processes: PyTorch's DDP and FSDP2 under torchrun.

| file | |
|---|---|
| ranks | which rank this process is, and collectives for Python objects; imports torch only with several processes |
| single | one process: nothing is communicated |
| distributed | what DDP and FSDP share: slices of the batch, one small all-gather per step, one verdict |
| ddp | every rank has the whole model; gradients are averaged, and replicas compared |
| fsdp | weights, gradients and moments are sharded across ranks |
| hsdp | several copies of sharded weights, which are averaged and compared as those of ddp |
| shards | the parts of sharded tensors, and sums over the ranks that hold them |
| owners | divides work on whole matrices among the ranks |
| loop | the ranks of a loop of the user's own, and the wrappers around its model |
| whole | whole weights for replays, gathered if they are sharded |
| options | the options of the config group |
| checkpoints | rank 0 accesses the disk, and all ranks get the same answers |
| failure_report | why a rank died, for the others to report |
"""
