"""Helpers of the tests of data: text files, the bytes of a batch, and arguments of an image folder."""

from PIL import Image

FOLDER = {
    "image_size": 8,
    "augment": "none",
    "val_fraction": 0.3,
    "cache_mb": 100,
    "mean": [0.0, 0.0, 0.0],
    "std": [1.0, 1.0, 1.0],
    "seed": 0,
}


def texts(tmp_path, files=1, length=1000):
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for number in range(files):
        words = " ".join(str(number * 100_000 + i) for i in range(length))
        (folder / f"{number:03}.txt").write_text(words[:length])
    return folder


def tokens(batch):
    """Returns the bytes of each sample, including the last target."""
    return [bytes([*row.tolist(), last]) for row, last in zip(batch.inputs, batch.targets[:, -1].tolist(), strict=True)]


def picture(path, red, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 255)).save(path)
