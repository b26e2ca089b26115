"""Augmentations: crops, flips and scaling, as the drawn numbers determine them."""

import numpy as np
import pytest
import torch

from stabletrain.data.augment import CropFlip, ResizedCrop, augmentation, resize
from stabletrain.data.order import uniform


def cut(augment, images, draws):
    return augment(images, augment.chosen(draws))


def test_crops_are_shifts_with_zeros_outside_and_half_are_mirrored():
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(4000, 3, 8, 8).contiguous()
    draws = uniform(np.arange(4000), 5, 3)
    out = cut(CropFlip(8), image, draws)
    mirrored = draws[:, 2] < 0.5
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.03)
    padded = np.pad(image[0, 0].numpy(), 1)
    for row in range(50):
        top, left = (draws[row, :2] * 3).astype(int)
        expected = padded[top : top + 8, left : left + 8]
        expected = expected[:, ::-1] if mirrored[row] else expected
        assert np.array_equal(out[row, 1].numpy(), expected)
    assert len({tuple(shift) for shift in (draws[:, :2] * 3).astype(int).tolist()}) == 9, "every shift occurs"
    assert torch.equal(cut(CropFlip(8, flip=False), image[:1], np.array([[0.5, 0.5, 0.0]])), image[:1])


def test_resized_crops_have_the_size_and_stay_inside():
    image = torch.full((3, 40, 100), 7, dtype=torch.uint8)
    for draws in uniform(np.arange(200), 3, 42):
        out = ResizedCrop(16)(image, draws)
        assert out.shape == (3, 16, 16)
        assert out.eq(7).all(), "nothing from outside the picture"


def test_a_picture_of_another_size_is_scaled_and_its_middle_cut():
    wide = torch.zeros(3, 16, 48, dtype=torch.uint8)
    wide[:, :, 16:32] = 200
    assert resize(wide, 8).eq(200).float().mean() > 0.7
    assert resize(wide, 8).shape == (3, 8, 8)


def test_augmentations_have_names():
    assert augmentation("resized_crop", 224) == ResizedCrop(224)


def one_by_one(images, draws, flip):
    """Reference for `CropFlip`: pads, crops and flips each image separately."""
    size = images.shape[-1]
    pad = max(1, size // 8)
    out = []
    for image, (y, x, mirror) in zip(images, draws[:, :3].tolist(), strict=True):
        padded = torch.zeros(image.shape[0], size + 2 * pad, size + 2 * pad, dtype=image.dtype)
        padded[:, pad:-pad, pad:-pad] = image
        top, left = int(y * (2 * pad + 1)), int(x * (2 * pad + 1))
        part = padded[:, top : top + size, left : left + size]
        out.append(part.flip(-1) if flip and mirror < 0.5 else part)
    return torch.stack(out)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 8), (1, 5)])
def test_one_gather_cuts_as_one_image_after_the_other(channels, size, flip):
    images = torch.randint(256, (64, channels, size, size), dtype=torch.uint8)
    draws = uniform(np.arange(64), 7, 42)
    draws[0, :3], draws[1, :3] = 0.0, np.nextafter(1.0, 0.0)
    found = cut(CropFlip(size, flip), images, draws)
    assert found.dtype == torch.uint8
    assert torch.equal(found, one_by_one(images, draws, flip))
