"""Several processes that train one model: PyTorch's DDP and FSDP2 under torchrun, and what the ranks must agree on.

| file | |
|---|---|
| ranks | which process this is, and what the processes tell each other; loads torch only when there are several |
| single | one process: nothing is shared |
| distributed | what every kind of several ranks has: parts of the batch, one small reduction a step, one verdict |
| ddp | every rank has the whole model; gradients are averaged, and replicas compared |
| fsdp | every rank has a part of every weight, gradient and moment |
| options | the options of the config group |
| checkpoints | one writer, and answers that are the same on every rank |
| failure_report | why a rank ended, for the others to report |
"""
