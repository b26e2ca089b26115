"""Whether the host waits for the card in a step of the loop, told by PyTorch's own `set_sync_debug_mode`.

What is read late, on purpose, waits on an event and is not counted: by then the next step has been launched.
"""

import torch
from jobs import Rounds


def waiting(run: Rounds) -> str:
    """What in an ordinary step makes the host wait for the device; `nothing`, or `unknown` where there is no card."""
    if run.job.device.type != "cuda":
        return "unknown"
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.compute()
        run.settle()
        run.commit()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return "nothing"
