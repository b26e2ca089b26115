"""Shared values of the precision tests: devices and fp16 settings."""

import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FP16 = {"init_scale": 65536.0, "growth_interval": 2000, "min_scale": 1.0}
