"""What every test starts from: one thread a worker, and PyTorch's switches as they were."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _switches():
    """Puts back the process-wide switches that precision and determinism set."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
