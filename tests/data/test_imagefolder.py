"""Folders of class folders: labels, sources and pixels stay together, and the cache changes no batch."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from stabletrain.data.imagefolder import Files, ImageFolder, files_of
from stabletrain.errors import ConfigError
from tests.data.given import FOLDER, picture


def red(batch):
    return (batch.inputs[:, 0, 0, 0] * 255).round().int().tolist()


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
    with pytest.raises(ConfigError, match=r"class0/3\.png cannot be read as an image"):
        [data.batch(0, data.batches(1, split), split) for split in ("train", "val")]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["0.png", "1.png"], "{path} has 0 class folders"),
        (["only/0.png"], "{path} has 1 class folder"),
        (["train/only/0.png", "val/only/0.png"], "{path}/train has 1 class folder"),
        (["training/a/0.png", "testing/a/0.png"], "the class folders are named testing and training"),
    ],
    ids=["no folders", "one class", "one class in train", "other names of splits"],
)
def test_another_layout_is_answered_with_the_expected_one(tmp_path, files, problem):
    for file in files:
        picture(tmp_path / file, 1)
    with pytest.raises(ConfigError) as refusal:
        ImageFolder(f"{tmp_path}/", **FOLDER)
    told = f"data.path={tmp_path}/: {problem.format(path=tmp_path)}: expected {tmp_path}/<class>/*.png, or "
    assert str(refusal.value).startswith(told)
    assert f"{tmp_path}/train/<class>/*.png and {tmp_path}/val/<class>/*.png" in str(refusal.value)


def test_a_file_and_empty_class_folders_are_refused(tmp_path):
    picture(tmp_path / "0.png", 1)
    with pytest.raises(ConfigError, match=r"data\.path=.*0\.png is a file: expected <folder>/<class>"):
        ImageFolder(str(tmp_path / "0.png"), **FOLDER)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"data\.path=.* has no images to train on: expected"):
        ImageFolder(str(tmp_path), **FOLDER)


def test_grey_pictures_have_one_channel(folder):
    data = ImageFolder(str(folder), **(FOLDER | {"mean": [0.0], "std": [1.0]}))
    assert data.batch(0, 2, "train").inputs.shape == (2, 1, 8, 8)
    assert data.in_channels == 1


def test_what_is_not_a_file_is_passed_over_and_a_missing_image_is_told(folder, tmp_path):
    expected = ImageFolder(str(folder), **FOLDER)
    os.mkfifo(folder / "class0" / "pipe.png")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        short = tmp_path / "s"  # a socket's path must be short
        listening.bind(str(short))
        short.rename(folder / "class0" / "socket.png")
    (folder / "class1" / "device.jpg").symlink_to("/dev/null")
    (folder / "class1" / "more.jpg").mkdir()
    found = ImageFolder(str(folder), **FOLDER)
    assert found.fingerprint() == expected.fingerprint()
    (folder / "class0" / "1.png").unlink()
    (folder / "class0" / "1.png").symlink_to(folder / "gone.png")
    found = ImageFolder(str(folder), **FOLDER)
    with pytest.raises(ConfigError, match=r"class0/1\.png cannot be read as an image .*No such file"):
        [found.batch(step, 1, split) for split in ("train", "val") for step in range(found.batches(1, split))]


def test_files_of_folders_below_a_class_come_in_a_fixed_order(folder):
    picture(folder / "class0" / "more" / "0.png", 50)
    picture(folder / "class0" / "more-0.png", 51)
    found = [name for name, _ in files_of(folder, ["class0", "class1"])]
    assert found == sorted(found, key=lambda name: name.split("/"))
    assert found.index("class0/more/0.png") < found.index("class0/more-0.png")
    assert len(found) == 22


def test_a_class_without_images_is_told(tmp_path):
    for split in ("train", "val"):
        for name in ("a", "b", "c"):
            picture(tmp_path / split / name / "0.png", 1)
    assert ImageFolder(str(tmp_path), **FOLDER).split == ""
    (tmp_path / "val" / "c" / "0.png").unlink()
    assert ImageFolder(str(tmp_path), **FOLDER).split == "no images to validate on in class c"
    for name in ("a", "b"):
        (tmp_path / "train" / name / "0.png").rename(tmp_path / "train" / name / "0.heic")
    with pytest.raises(ConfigError, match=r"no images to train on in class a, b: remove the folder, or add"):
        ImageFolder(str(tmp_path), **FOLDER)


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_the_validation_folder_has_one_of_four_names(tmp_path, name):
    for split in ("train", name):
        for label in ("a", "b"):
            picture(tmp_path / split / label / "0.png", 1)
    data = ImageFolder(str(tmp_path), **FOLDER)
    assert f"/{name}/" in data.batch(0, 1, "val").sources[0]
    assert data.batches(1, "train") == data.batches(1, "val") == 2


@pytest.mark.parametrize(("given", "ranks", "expected"), [(None, "1", 6), (None, "4", 1), (None, "8", 1), (5, "4", 5)])
def test_workers_default_to_this_ranks_share_of_the_cores(folder, monkeypatch, given, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    data = ImageFolder(str(folder), **FOLDER, workers=given)
    assert data._pool._max_workers == expected


def test_images_are_decoded_by_the_workers_at_the_same_time(folder, monkeypatch):
    both, real = threading.Barrier(2), Files.__call__

    def together(self, index):
        both.wait(60)
        return real(self, index)

    monkeypatch.setattr(Files, "__call__", together)
    for augment in ("crop_flip", "resized_crop"):
        data = ImageFolder(str(folder), **(FOLDER | {"augment": augment, "cache_mb": 0}), workers=2)
        assert len(data.batch(0, 4, "train")) == 4


def test_a_worker_uses_one_core_and_other_threads_as_many_as_before(folder):
    def seen_by(pool):
        return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        data = ImageFolder(str(folder), **FOLDER, workers=2)
        assert seen_by(data._pool) == 1
        with ThreadPoolExecutor(1) as later:
            assert seen_by(later) == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
