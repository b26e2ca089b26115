"""Export of a ResNet for torchvision: its state dict, under torchvision's names, as safetensors.

`models/resnet.py` has torchvision's names already, so nothing is renamed. The first layer must be torchvision's too:
the large stem, on colour images.
"""

from dataclasses import dataclass
from pathlib import Path

import torchvision
from safetensors.torch import load_file
from torch import nn

from stabletrain.beside.export.to_safetensors import save
from stabletrain.beside.export.trained import Format, Trained, Written, compare, pictures
from stabletrain.errors import ConfigError
from stabletrain.models.resnet import STAGES, TorchvisionResNet
from stabletrain.weights.files import ONE_FILE

TOLERANCE = 1e-5
"""Largest difference of logits; both compute in fp32."""

OTHER_FORMATS = "use --to safetensors or --to onnx"


@dataclass(frozen=True)
class Torchvision(Format):
    """`model.safetensors`, for `torchvision.models.resnet18` and its relatives."""

    def refuse(self, trained: Trained) -> None:
        """Raises ConfigError if the first layer is not torchvision's."""
        model = trained.model
        assert isinstance(model, TorchvisionResNet)
        if isinstance(model.maxpool, nn.Identity):
            raise ConfigError(
                f"{trained.name}: model.stem=small begins with a 3 x 3 convolution, and torchvision's ResNet with "
                f"7 x 7 and a max-pool: {OTHER_FORMATS}, or train with model.stem=large"
            )
        if (channels := model.conv1.in_channels) != 3:
            raise ConfigError(
                f"{trained.name}: model.in_channels={channels}, but torchvision's ResNet reads 3 channels: "
                f"{OTHER_FORMATS}"
            )

    def write(self, trained: Trained, folder: Path) -> Written:
        """Writes the file; compares the logits with those of torchvision's model."""
        model = trained.model
        assert isinstance(model, TorchvisionResNet)
        name, classes = f"resnet{depth_of(model)}", model.fc.out_features
        save(model.state_dict(), folder / ONE_FILE, {**trained.origin, "num_classes": str(classes)})
        other = getattr(torchvision.models, name)(num_classes=classes).eval()
        other.load_state_dict(load_file(folder / ONE_FILE))
        checked = compare(model, other, pictures(3, 64), TOLERANCE, f"torchvision {torchvision.__version__}")
        load = [
            "import torchvision",
            "from safetensors.torch import load_file",
            f"model = torchvision.models.{name}(num_classes={classes})",
            f"model.load_state_dict(load_file('{{folder}}/{ONE_FILE}'))",
        ]
        return Written(checked, load, [trained.reads] if trained.reads else [])


def depth_of(model: TorchvisionResNet) -> int:
    """Returns the number in the model's name."""
    stages = [len(stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
    return next(d for d, (block, blocks) in STAGES.items() if blocks == stages and isinstance(model.layer1[0], block))
