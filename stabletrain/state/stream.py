"""The safetensors format, piece by piece: a header, then each tensor's own memory, so that no second copy is
made.

Format: 8 bytes of length, a JSON header, the tensors' bytes (github.com/huggingface/safetensors, "Format").
The library's `save_file` leaves no chance to hash and synchronise what is written, and makes files that only
their owner can read. Reading is the library's.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Safetensors' names of the dtypes it can hold."""


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file.

    Args:
        tensors: contiguous, on the CPU, any shape; their memory is handed out, not copied.

    Raises:
        TypeError: a dtype that the format does not know.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each one is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise TypeError(f"state '{name}' is {tensor.dtype}, which safetensors cannot hold")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy())
