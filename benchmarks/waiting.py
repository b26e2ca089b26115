"""Checks that the host does not wait for the GPU in a step of the loop, by PyTorch's `set_sync_debug_mode`.

Values that are read late on purpose wait on an event and do not count: by then the next step has been launched.
"""

import torch
from jobs import Rounds


def waiting(run: Rounds) -> str:
    """Returns what makes the host wait in an ordinary step: `nothing`, or `unknown` on a CPU."""
    if run.job.device.type != "cuda":
        return "unknown"
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.compute()
        run.judge()
        run.commit()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return "nothing"
