"""What every test starts from: one thread a worker, PyTorch's switches as they were, a cuBLAS that can be strict."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which CUDA reads once, when the first test starts it


@pytest.fixture(autouse=True)
def _switches():
    """Puts back the process-wide switches that precision and determinism set."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
