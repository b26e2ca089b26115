"""Images: splits, normalisation, augmentation by number, folders of class folders."""

import numpy as np
import pytest
import torch
from PIL import Image

from stabletrain.data.augment import CropFlip, ResizedCrop, augmentation, fit
from stabletrain.data.imagefolder import ImageFolder
from stabletrain.data.images import Cifar10, Digits, Held, Images
from stabletrain.data.order import uniform
from stabletrain.errors import ConfigError

FOLDER = {
    "image_size": 8,
    "augment": "none",
    "val_fraction": 0.3,
    "cache_mb": 100,
    "mean": [0.0, 0.0, 0.0],
    "std": [1.0, 1.0, 1.0],
    "seed": 0,
}


def picture(path, red, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 255)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes of ten pictures; the red of each is its number."""
    for label in range(2):
        for i in range(10):
            picture(tmp_path / "set" / f"class{label}" / f"{i}.png", 100 * label + i)
    return tmp_path / "set"


def red(batch):
    return (batch.inputs[:, 0, 0, 0] * 255).round().int().tolist()


def test_digits_are_split_by_class_and_normalised():
    data = Digits("none", seed=0)
    val = [data.batch(step, 64, "val") for step in range(data.batches(64, "val"))]
    labels = torch.cat([batch.targets for batch in val])
    assert len(labels) == 359
    assert labels.bincount().min() >= 34
    train = torch.cat([data.batch(step, 64, "train").inputs for step in range(data.batches(64, "train"))])
    assert abs(train.mean()) < 0.05
    assert abs(train.std() - 1) < 0.05


def test_a_folder_keeps_labels_sources_and_pixels_together(folder):
    data = ImageFolder(str(folder), **FOLDER)
    assert data.classes == ["class0", "class1"]
    seen = []
    for split in ("train", "val"):
        for step in range(data.batches(1, split)):
            batch = data.batch(step, 1, split)
            name = batch.sources[0]
            seen.append(name)
            number = int(name.rsplit("/", 1)[1][:-4])
            assert red(batch) == [100 * int(batch.targets[0]) + number]
            assert f"class{int(batch.targets[0])}/" in name
            assert batch.inputs[0, 2].eq(1).all(), "blue is 255, so 1"
    assert len(seen) == len(set(seen)) == 20, "one pass over both splits sees every picture once"


def test_train_and_test_folders_are_the_splits(tmp_path):
    for split, count in (("train", 6), ("test", 4)):
        for label in range(2):
            for i in range(count):
                picture(tmp_path / split / f"class{label}" / f"{i}.png", i)
    data = ImageFolder(str(tmp_path), **FOLDER)
    assert data.batches(1, "train") == 12
    assert data.batches(1, "val") == 8
    assert "/test/" in data.batch(0, 1, "val").sources[0]


@pytest.mark.parametrize("cache_mb", [0, 100])
@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_a_batch_is_a_pure_function_of_its_number_cached_or_not(folder, augment, cache_mb):
    chosen = FOLDER | {"augment": augment}
    data, other = ImageFolder(str(folder), **chosen), ImageFolder(str(folder), **(chosen | {"cache_mb": cache_mb}))
    torch.manual_seed(1)
    first = data.batch(3, 8, "train")
    other.batch(9, 8, "train")
    torch.rand(5)
    second = other.batch(3, 8, "train")
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)


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


def test_crops_are_shifts_with_zeros_outside_and_half_are_mirrored():
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(4000, 3, 8, 8).contiguous()
    draws = uniform(np.arange(4000), 5, 3)
    out = CropFlip()(image, draws)
    mirrored = draws[:, 2] < 0.5
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.03)
    padded = np.pad(image[0, 0].numpy(), 1)
    for row in range(50):
        top, left = (draws[row, :2] * 3).astype(int)
        expected = padded[top : top + 8, left : left + 8]
        expected = expected[:, ::-1] if mirrored[row] else expected
        assert np.array_equal(out[row, 1].numpy(), expected)
    assert len({tuple(shift) for shift in (draws[:, :2] * 3).astype(int).tolist()}) == 9, "every shift occurs"
    assert torch.equal(CropFlip(flip=False)(image[:1], np.array([[0.5, 0.5, 0.0]])), image[:1])


def test_resized_crops_have_the_size_and_stay_inside():
    image = torch.full((3, 40, 100), 7, dtype=torch.uint8)
    for draws in uniform(np.arange(200), 3, 42):
        out = ResizedCrop(16)(image, draws)
        assert out.shape == (3, 16, 16)
        assert out.eq(7).all(), "nothing from outside the picture"


def test_a_picture_of_another_size_is_scaled_and_its_middle_cut():
    wide = torch.zeros(3, 16, 48, dtype=torch.uint8)
    wide[:, :, 16:32] = 200
    assert fit(wide, 8).eq(200).float().mean() > 0.7
    assert fit(wide, 8).shape == (3, 8, 8)


def test_images_come_channels_last(folder):
    batch = ImageFolder(str(folder), **FOLDER).batch(0, 4, "train")
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.inputs.dtype == torch.float32


@pytest.mark.parametrize(("cache_mb", "again"), [(100, False), (0.0, True)])
def test_small_pictures_are_decoded_once_if_they_fit_the_cache(folder, cache_mb, again):
    data = ImageFolder(str(folder), **(FOLDER | {"cache_mb": cache_mb}))
    before = data.batch(0, 4, "val").inputs
    for file in folder.rglob("*.png"):
        Image.new("RGB", (8, 8), (9, 9, 9)).save(file)
    assert torch.equal(data.batch(0, 4, "val").inputs, before) != again


def test_a_train_folder_alone_is_split(tmp_path, folder):
    folder.rename(tmp_path / "train")
    data = ImageFolder(str(tmp_path), **FOLDER)
    assert data.batches(1, "train") + data.batches(1, "val") == 20


def test_a_broken_picture_is_named(folder):
    (folder / "class0" / "3.png").write_bytes(b"no picture")
    data = ImageFolder(str(folder), **FOLDER)
    with pytest.raises(ConfigError, match=r"class0/3\.png cannot be read as a picture"):
        [data.batch(0, data.batches(1, split), split) for split in ("train", "val")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": None}, r"data\.path is not set"),
        ({"path": "nowhere"}, r"data\.path=nowhere does not exist"),
        ({"image_size": 0}, r"data\.image_size=0"),
        ({"augment": "mixup"}, r"data\.augment=mixup is none of none, crop, crop_flip, resized_crop"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1\.0"),
        ({"mean": [0.5, 0.5]}, r"data\.mean=\[0\.5, 0\.5\]"),
        ({"std": [1.0, 0.0, 1.0]}, r"data\.std="),
        ({"std": [1.0]}, r"data\.mean has 3 numbers and data\.std 1"),
    ],
)
def test_bounds_are_named(folder, values, message):
    with pytest.raises(ConfigError, match=message):
        ImageFolder(**({"path": str(folder)} | FOLDER | values))


def test_one_class_folder_is_refused(tmp_path):
    picture(tmp_path / "only" / "0.png", 1)
    with pytest.raises(ConfigError, match="has 1 class folders"):
        ImageFolder(str(tmp_path), **FOLDER)


def test_grey_pictures_have_one_channel(folder):
    data = ImageFolder(str(folder), **(FOLDER | {"mean": [0.0], "std": [1.0]}))
    assert data.batch(0, 2, "train").inputs.shape == (2, 1, 8, 8)
    assert data.in_channels == 1


def test_cifar_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(ConfigError, match=r"does not hold CIFAR-10: data\.download=true fetches it"):
        Cifar10(str(tmp_path), False, "none", [0.5] * 3, [0.5] * 3, 0)


def test_cifar_that_cannot_be_fetched_says_so(tmp_path, monkeypatch):
    import torchvision

    def unreachable(*_, **__):
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", unreachable)
    with pytest.raises(ConfigError, match="could not be fetched .*network is unreachable"):
        Cifar10(str(tmp_path), True, "none", [0.5] * 3, [0.5] * 3, 0)


def test_augmentations_have_names():
    assert augmentation("resized_crop", 224) == ResizedCrop(224)


def one_by_one(images, draws, flip):
    """The reference of `CropFlip`: each image is padded, cut and mirrored by itself."""
    size = images.shape[-1]
    pad = max(1, size // 8)
    out = []
    for image, (y, x, mirror) in zip(images, draws[:, :3].tolist(), strict=True):
        padded = torch.zeros(image.shape[0], size + 2 * pad, size + 2 * pad, dtype=image.dtype)
        padded[:, pad:-pad, pad:-pad] = image
        top, left = int(y * (2 * pad + 1)), int(x * (2 * pad + 1))
        cut = padded[:, top : top + size, left : left + size]
        out.append(cut.flip(-1) if flip and mirror < 0.5 else cut)
    return torch.stack(out)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 8), (1, 5)])
def test_one_gather_cuts_as_one_image_after_the_other(channels, size, flip):
    images = torch.randint(256, (64, channels, size, size), dtype=torch.uint8)
    draws = uniform(np.arange(64), 7, 42)
    draws[0, :3], draws[1, :3] = 0.0, np.nextafter(1.0, 0.0)
    found = CropFlip(flip)(images, draws)
    assert found.dtype == torch.uint8
    assert torch.equal(found, one_by_one(images, draws, flip))


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_pictures_that_are_held_make_batches_where_they_are(augment):
    """`meta` stands for a card: what would be computed on the host, or copied from it by value, fails on it."""
    held = {
        split: Held(torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), [0, 1] * 6, split)
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
        split: Held(torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), [0, 1] * 6, split)
        for split in ("train", "val")
    }
    data = Images("set", held, ["a", "b"], size=4, mean=[0.5] * 3, std=[0.2] * 3, augment="crop", seed=0)
    data.to(torch.device("meta"))
    assert data.batch(0, 4, "train").inputs.device.type == "cpu"
