"""Decoding: torchvision and Pillow give the same pixels, and no range of pixels is clipped in silence."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from stabletrain.data.imagefolder import decode, decoded_jpeg
from stabletrain.errors import ConfigError


def photo(mode="RGB", size=(37, 53)):
    """An image with smooth and sharp parts."""
    drawn = np.random.default_rng(0)
    coarse = Image.fromarray(drawn.integers(0, 256, (6, 5, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)).astype(int) + drawn.integers(
        -9, 9, (*size[::-1], 3)
    )
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def by_pillow(path, mode="RGB"):
    with Image.open(path) as opened:
        found = np.array(opened.convert(mode))
    return torch.from_numpy(found.reshape(*found.shape[:2], -1)).permute(2, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 90},
        {"quality": 30, "subsampling": "4:2:0"},
        {"quality": 75, "subsampling": "4:4:4"},
        {"quality": 75, "subsampling": "4:2:2", "progressive": True},
        {"quality": 90, "exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"},
    ],
    ids=["plain", "4:2:0", "4:4:4", "progressive", "rotated by a tag"],
)
def test_torchvision_decodes_a_jpeg_as_pillow_does(tmp_path, options):
    photo().save(tmp_path / "a.jpg", **options)
    assert torch.equal(decoded_jpeg(tmp_path / "a.jpg"), by_pillow(tmp_path / "a.jpg"))
    assert torch.equal(decode(tmp_path / "a.jpg", "RGB"), by_pillow(tmp_path / "a.jpg"))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("name", "stored"),
    [*(("a.jpg", mode) for mode in ("L", "RGB", "CMYK")), *(("a.png", mode) for mode in ("RGBA", "P", "1", "LA"))],
)
def test_every_kind_of_8_bits_is_what_pillow_makes_of_it(tmp_path, name, stored, mode):
    photo(stored).save(tmp_path / name)
    assert torch.equal(decode(tmp_path / name, mode), by_pillow(tmp_path / name, mode))


def test_a_jpeg_that_is_cut_off_is_refused(tmp_path):
    held = io.BytesIO()
    photo(size=(200, 200)).save(held, "JPEG")
    (tmp_path / "a.jpg").write_bytes(held.getvalue()[: len(held.getvalue()) // 2])
    with pytest.raises(ConfigError, match=r"a\.jpg cannot be read as an image .*truncated"):
        decode(tmp_path / "a.jpg", "RGB")


def ramp(dtype=np.uint16, highest=65535):
    return np.linspace(0, highest, 40 * 30).round().astype(dtype).reshape(30, 40)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.ppm"])
def test_a_grey_picture_of_16_bits_is_scaled_by_its_range(tmp_path, name, mode):
    if name == "a.ppm":
        header = b"P5 40 30 65535\n"
        (tmp_path / name).write_bytes(header + ramp().astype(">u2").tobytes())
    else:
        Image.fromarray(ramp()).save(tmp_path / name)
    found = decode(tmp_path / name, mode)
    expected = torch.from_numpy(np.floor(ramp() / 257 + 0.5).astype(np.uint8))
    assert found.shape == (1 if mode == "L" else 3, 30, 40)
    assert all(torch.equal(channel, expected) for channel in found)
    assert (int(found.min()), int(found.max())) == (0, 255)


def test_a_tiff_of_12_bits_is_scaled_by_12_bits(tmp_path):
    values = ramp(highest=4095)
    packed = bytearray()
    for first, second in values.reshape(-1, 2).tolist():
        packed += bytes([first >> 4, (first & 15) << 4 | second >> 8, second & 255])
    tags = [(256, 3, 40), (257, 3, 30), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 3, 30), (279, 4, len(packed))]
    table = b"".join(
        tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, kind, value in tags
    )
    offset = 8 + len(packed)
    file = b"II*\0" + offset.to_bytes(4, "little") + bytes(packed) + len(tags).to_bytes(2, "little") + table + bytes(4)
    (tmp_path / "a.tif").write_bytes(file)
    expected = torch.from_numpy(np.floor(values / 4095 * 255 + 0.5).astype(np.uint8))
    assert torch.equal(decode(tmp_path / "a.tif", "L")[0], expected)


def test_a_colour_picture_of_16_bits_keeps_its_range(tmp_path):
    import struct
    import zlib

    values = np.stack([ramp(), ramp()[::-1], np.full((30, 40), 65535, np.uint16)], -1)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 30, 16, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(file)
    found = decode(tmp_path / "a.png", "RGB")
    assert torch.equal(found, torch.from_numpy((values >> 8).astype(np.uint8)).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.float32, "floats"), (np.int32, "32-bit integers")], ids=["floats", "integers"]
)
def test_a_picture_of_unknown_range_is_refused(tmp_path, dtype, kind):
    Image.fromarray(ramp(dtype, 1)).save(tmp_path / "a.tif")
    message = rf"a\.tif cannot be read as an image \(its pixels are {kind}, of unknown range: save it with 8 or 16 bits"
    with pytest.raises(ConfigError, match=message):
        decode(tmp_path / "a.tif", "RGB")
