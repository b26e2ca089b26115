"""Time of gpt2's head and loss, forward and backward: with and without a padded vocabulary, and compiled.

    python benchmarks/head.py --json head.json
    python benchmarks/head.py --tiny --precision bf16

Only head and loss run, on 8 x 1024 random features of width 768 and a vocabulary of 50,257, in the chunks that
`loss_chunk=auto` takes on this device. The kinds alternate. A compiled kind is compiled in the rounds that warm up.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from measuring import Budget, Clock, command_line, head, in_turns, machine, modes, quartiles, ratios, row, save
from torch import Tensor, nn

from stabletrain.guard.policy import NoGuard
from stabletrain.machine import hardware
from stabletrain.machine.compiling import compile_, undo_compile_
from stabletrain.models import head as padding
from stabletrain.records import Batch
from stabletrain.stability.objective import CrossEntropy, ZLoss
from stabletrain.stability.objective.chunked_loss import ChunkedLogits, ChunkedLoss, tokens_at_once
from stabletrain.tools import Tools

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.workloads import gpt, plain_tools

SIZES = {"full": (768, 8, 1024, 50257), "tiny": (64, 2, 128, 4001)}
"""Width, sequences, tokens in a sequence, and vocabulary."""


@contextmanager
def multiple(rows: int):
    """A context in which the vocabulary is padded to a multiple of `rows`."""
    before, padding.ROWS_MULTIPLE = padding.ROWS_MULTIPLE, rows
    try:
        yield
    finally:
        padding.ROWS_MULTIPLE = before


def kinds(model: nn.Module, tools: Tools, loss: ChunkedLoss, features: Tensor, targets: Tensor) -> dict[str, Callable]:
    """Returns what runs head and loss once, by name."""
    count, batch = torch.full((), targets.numel(), device=targets.device), Batch(features, targets)

    def run() -> None:
        model.zero_grad()
        x = features.detach().requires_grad_()
        loss(
            ChunkedLogits(x, model, tools, torch.Size((*x.shape[:-1], loss.vocabulary))), batch, count
        ).total.backward()

    def unpadded() -> None:
        with multiple(1):
            run()

    def compiled() -> None:
        compile_(model, targets.shape)
        try:
            run()
        finally:
            undo_compile_(model)

    return {"unpadded": unpadded, "padded": run, "padded, compiled": compiled}


def main() -> None:
    """Measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 10)
    parser.add_argument("--tiny", action="store_true", help="a small head, for a test on a CPU")
    parser.set_defaults(precision="bf16")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    width, samples, length, vocab = SIZES["tiny" if asked.tiny else "full"]
    tokens = 128 if asked.tiny else tokens_at_once(vocab, device)
    print(f"{machine(device)}, chunks of {tokens} tokens")
    print(head("precision", "head and loss", "ms", "over unpadded", "quartiles"))
    clock, results = Clock(device, asked.clock), []
    until = Budget(asked.budget).share(1)
    for mode in modes(asked.precision, device):
        torch.manual_seed(0)
        with device:
            model, inputs, targets = gpt(1, width, length, samples, vocab)
            features = torch.randn(*inputs.shape, width)
        tools = plain_tools(mode, device, NoGuard())
        loss = ChunkedLoss(CrossEntropy(ZLoss(1e-4)), tokens, vocab)
        runs = kinds(model, tools, loss, features, targets)
        turns = {name: (lambda _, run=run: clock.seconds(run)) for name, run in runs.items()}
        taken = in_turns(turns, asked.rounds, until=until)
        for name, seconds in taken.items():
            middle, low, high = quartiles(ratios(seconds, taken["unpadded"]))
            milliseconds = 1e3 * quartiles(seconds)[0]
            print(row(mode, name, f"{milliseconds:.2f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"), flush=True)
            results.append({"precision": mode, "what": name, "tokens": tokens, "seconds": seconds, "over": middle})
    save(asked.json, device, results, {})


if __name__ == "__main__":
    main()
