"""The built-in models, to be built in plain Python: `GPT(vocab_size=256)`, `CifarResNet(depth=56)`.

| name | option |
|---|---|
| `GPT` | `model=gpt_nano`, `gpt_mini`, `gpt2` |
| `CifarResNet` | `model=resnet20` |
| `TorchvisionResNet` | `model=resnet18`, `resnet50` |
| `NFResNet` | `model=nf_resnet20` |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabletrain.models.gpt import GPT
    from stabletrain.models.nf_resnet import NFResNet
    from stabletrain.models.resnet import CifarResNet, TorchvisionResNet

__all__ = ["GPT", "CifarResNet", "NFResNet", "TorchvisionResNet"]

PLACES = {
    "GPT": "stabletrain.models.gpt",
    "CifarResNet": "stabletrain.models.resnet",
    "NFResNet": "stabletrain.models.nf_resnet",
    "TorchvisionResNet": "stabletrain.models.resnet",
}
"""The module of each name. It is imported on first use, so that a GPT does not load torchvision."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
