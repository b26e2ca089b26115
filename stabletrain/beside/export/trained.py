"""A trained model to export, and the role of a format that writes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import StabletrainError
from stabletrain.trainer.contract import output_of


@dataclass(frozen=True)
class Trained:
    """A trained model and where it comes from.

    Attributes:
        model: on the CPU, in eval mode, with fp32 parameters.
        config: the config group `model` as the run composed it, with every size filled in.
        choices: the run's option of each config group; empty if unknown.
        origin: where the weights come from, for the header of a file: run, step ...
        samples: returns two inputs of the run's validation data.
        reads: a line on how images become inputs; empty for other data.
        tokenizer: `bytes`, the name of tiktoken's encoding, or None if it is unknown or there is none.
    """

    model: nn.Module
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    origin: Mapping[str, str]
    samples: Callable[[], Tensor]
    reads: str = ""
    tokenizer: str | None = None

    @property
    def name(self) -> str:
        """What messages call the model: the option that the user chose, else the `_target_`."""
        return f"model={self.choices.get('model', self.config.get('_target_', '?'))}"


@dataclass(frozen=True)
class Written:
    """A format's report about the files that it wrote.

    Attributes:
        checked: how the result was compared with the run's model; empty if the library for it is not installed.
        load: lines of Python or shell that load the result, with `{folder}` for its place.
        notes: other lines for the user.
    """

    checked: str
    load: Sequence[str]
    notes: Sequence[str] = field(default=())


class Format:
    """A kind of export. Base class of all kinds."""

    def refuse(self, trained: Trained) -> None:
        """Raises ConfigError if the model cannot be written in this format; names the key, its value and what to do."""
        raise NotImplementedError

    def write(self, trained: Trained, folder: Path) -> Written:
        """Writes files into `folder`, reads them back, and compares the result with the model.

        Raises:
            StabletrainError: the result differs.
        """
        raise NotImplementedError


@torch.no_grad()
def compare(model: nn.Module, other: Callable[[Tensor], Tensor], inputs: Tensor, bound: float, by: str) -> str:
    """Returns a line that says how far two models' outputs are apart.

    Args:
        model: the run's model.
        other: the exported one.
        inputs: of both.
        bound: the largest difference allowed, as a multiple of the largest absolute output, or of 1 if that is less.
        by: what computes `other`.

    Raises:
        StabletrainError: they are further apart, or not finite.
    """
    ours, theirs = output_of(model(inputs)), other(inputs)
    difference = (ours.double() - theirs.double()).abs().max().item()
    allowed = bound * max(1.0, ours.abs().max().item())
    if not difference <= allowed:
        raise StabletrainError(
            f"the exported model differs: {by} computes outputs that are up to {difference:.2g} from the run's, the "
            f"bound is {allowed:.2g}; nothing was written. Please report this, with the run's .hydra/config.yaml"
        )
    return f"{by} computes the same outputs; the largest difference is {difference:.1g}"


def tokens(vocab: int, length: int) -> Tensor:
    """Returns two sequences of random token ids, the same in every call; `[2, length]` on the CPU."""
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(0))


def pictures(channels: int, size: int) -> Tensor:
    """Returns two random images, the same in every call; fp32 `[2, channels, size, size]` on the CPU."""
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))
