"""Images: splits, normalisation, augmentation by number, and images in the device's memory."""

import pytest
import torch

from stabletrain.data.imagefolder import ImageFolder
from stabletrain.data.images import Cifar10, Digits, Images, InMemory
from stabletrain.errors import ConfigError
from tests.data.given import FOLDER


def test_digits_are_split_by_class_and_normalised():
    data = Digits("none", seed=0)
    val = [data.batch(step, 64, "val") for step in range(data.batches(64, "val"))]
    labels = torch.cat([batch.targets for batch in val])
    assert len(labels) == 359
    assert labels.bincount().min() >= 34
    train = torch.cat([data.batch(step, 64, "train").inputs for step in range(data.batches(64, "train"))])
    assert abs(train.mean()) < 0.05
    assert abs(train.std() - 1) < 0.05


def test_augmentation_draws_nothing_from_the_global_generator(folder):
    data = ImageFolder(str(folder), **(FOLDER | {"augment": "crop_flip"}))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    data.batch(0, 8, "train")
    assert torch.equal(torch.rand(3), expected)


def test_the_same_picture_is_cut_differently_in_another_epoch(folder):
    data = ImageFolder(str(folder), **(FOLDER | {"augment": "crop_flip"}))
    count = data.batches(1, "train")
    batches = [data.batch(step, 1, "train") for step in range(20 * count)]
    one = [b.inputs for b in batches if b.sources[0] == batches[0].sources[0]]
    assert len(one) == 20
    assert len({tuple(each.flatten().tolist()) for each in one}) > 2


def test_validation_is_not_augmented(folder):
    plain, cut = (ImageFolder(str(folder), **(FOLDER | {"augment": name})) for name in ("none", "crop_flip"))
    assert torch.equal(plain.batch(0, 4, "val").inputs, cut.batch(0, 4, "val").inputs)


def test_images_come_channels_last(folder):
    batch = ImageFolder(str(folder), **FOLDER).batch(0, 4, "train")
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.inputs.dtype == torch.float32


def test_a_failed_download_of_cifar_is_one_message(tmp_path, monkeypatch):
    import torchvision

    def unreachable(*_, **__):
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", unreachable)
    with pytest.raises(ConfigError, match="could not be downloaded .*network is unreachable"):
        Cifar10(str(tmp_path), True, "none", [0.5] * 3, [0.5] * 3, 0)


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_pictures_that_are_held_make_batches_where_they_are(augment):
    """`meta` stands for a GPU: computing on the host, or copying values from the host, would fail on it."""
    held = {
        split: InMemory(torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), [0, 1] * 6, split)
        for split in ("train", "val")
    }
    data = Images("set", held, ["a", "b"], size=8, mean=[0.5] * 3, std=[0.2] * 3, augment=augment, seed=0)
    here = data.batch(1, 4, "train")
    data.to(torch.device("meta"))
    for split in ("train", "val"):
        batch = data.batch(1, 4, split)
        assert (batch.inputs.device.type, batch.targets.device.type) == ("meta", "meta")
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
        assert batch.ids is not None
        assert batch.ids.device.type == "cpu"
    assert torch.equal(data.batch(1, 4, "train").ids, here.ids)


def test_pictures_that_are_scaled_one_by_one_stay_on_the_host():
    held = {
        split: InMemory(torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), [0, 1] * 6, split)
        for split in ("train", "val")
    }
    data = Images("set", held, ["a", "b"], size=4, mean=[0.5] * 3, std=[0.2] * 3, augment="crop", seed=0)
    data.to(torch.device("meta"))
    assert data.batch(0, 4, "train").inputs.device.type == "cpu"
