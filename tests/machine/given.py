"""Shared values of the tests of max-pooling."""

import torch

POOLINGS = {
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "every pixel": {"kernel_size": 3, "stride": 1, "padding": 1},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "ceil_mode": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
