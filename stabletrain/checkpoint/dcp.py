"""Writes and reads sharded tensors with PyTorch's distributed checkpoint (DCP), without pickle.

DCP plans which rank writes which shard (`DefaultSavePlanner`), and which stored pieces a rank has to read
(`DefaultLoadPlanner`), however many ranks wrote them. Its default format stores the plan as a pickle. Its
safetensors format stores the position of every piece in the file's JSON header (`hf_storage.py`, PyTorch 2.11), and
also reads the safetensors files of any other program.

`dcp.save` and `dcp.load` use collectives, which a background thread must not, to agree on which rank writes the tensors
that all ranks have. Here it is always rank 0, so every rank can plan alone. That is why this file calls DCP's planner,
writer and reader one by one.
"""

import io
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stabletrain.checkpoint.tree import Piece, is_of_first_copy, is_sharded, local_part, to_host
from stabletrain.checkpoint.writer import WriteFile

Shapes = Mapping[str, Sequence[int]]
"""Shapes of the whole tensors, by name."""


class Copies(DefaultSavePlanner):
    """Plans what one rank writes, and copies it to the host at once.

    Attributes:
        copies: host copies by name: this rank's shard of each sharded tensor, unless another rank writes the same one,
            and on rank 0 also all other tensors.

    Args:
        tensors: the same names on every rank, on any device; or a `Piece` of each sharded tensor.
        rank: this rank.
    """

    def __init__(self, tensors: Mapping[str, Any], rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        first = rank == 0
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        mine = {name: each for name, each in tensors.items() if first or (parts[name].numel() and is_written(each))}
        outlines = {name: value.on("meta") if isinstance(value, Piece) else value for name, value in mine.items()}
        self.set_up_planner(outlines, is_coordinator=first)
        self.create_local_plan()
        self.state_dict = {}  # drop the live tensors: `copies` replaces them
        self.copies: dict[str, Tensor] = to_host({name: parts[name] for name in mine})

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Returns the host copy that DCP writes in place of the planned tensor."""
        # DCP would clone a tensor whose storage is larger than itself, and all clones would be alive at once.
        copy = self.copies[index.fqn]
        return torch.from_numpy(copy.view(-1).view(torch.uint8).numpy()).view(copy.dtype).view(copy.shape)

    def write(self, folder: Path, rank: int, count: int, write_file: WriteFile) -> dict[str, dict[str, Any]]:
        """Writes this rank's file into `folder`, if it has any tensors; returns its manifest entry by file name.

        Raises:
            OSError: the disk is full or gone.
        """
        files = FileHandoff(write_file)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        writer.fs, writer.sync_files, writer.per_thread_copy_ahead = files, False, 0  # `write_file` synchronises
        plan = writer.prepare_global_plan([self.plan] * count)[rank]
        writer.write_data(self.finish_plan(plan), self).wait()
        return files.entries


def is_written(tensor: Any) -> bool:
    """Returns whether a rank other than 0 writes its part of a tensor: if it is sharded, and no other rank does."""
    return is_sharded(tensor) and is_of_first_copy(tensor)


class FileHandoff(FileSystem):
    """A DCP file system that passes the content of each complete file to a function.

    Attributes:
        entries: what the function returned, by file name.
    """

    def __init__(self, write_file: WriteFile) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self._write_file = write_file

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        """Yields a stream to write to. Nothing is copied."""
        content = ByteStream()
        yield content
        self.entries[Path(path).name] = self._write_file(Path(path), content.pieces)


class ByteStream(io.RawIOBase):
    """A stream that keeps the pieces written to it, without joining them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        """Appends `piece`."""
        self.pieces.append(piece)
        return len(piece)

    def tell(self) -> int:
        """Returns the number of bytes so far."""
        return sum(map(len, self.pieces))


class ListedFiles(FileSystem):
    """A DCP file system that lists only `files`, so that unverified files in the folder are never read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        """Returns the paths of the files."""
        return [str(file) for file in self._files]


class Targets(DefaultLoadPlanner):
    """Plans what one rank reads, and where to.

    Args:
        outlines: for each tensor, one of its shape that is sharded as it is read.
        targets: for each tensor, or this rank's shard of it, where it is read to.
        metadata: of the files.
    """

    def __init__(self, outlines: Mapping[str, Tensor], targets: Mapping[str, Tensor], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._targets = targets
        self.set_up_planner(dict(outlines), metadata, is_coordinator=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns where DCP writes the planned tensor."""
        return self._targets[index.fqn]


def read(files: Sequence[Path], shapes: Shapes | None, places: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reads the tensors of safetensors files to the host: those in `places` as a `Piece`, all others whole.

    Args:
        files: written by any number of ranks, or by one process.
        shapes: of all tensors, by name; None if one process wrote them whole.
        places: sharded tensors by name. This rank reads its shards of them, in the dtype of the file. If the shapes
            differ, a tensor is read whole.

    Raises:
        ValueError: the pieces of a tensor do not cover it.
        SafetensorError, KeyError, TypeError, RuntimeError: a file has unexpected content.
    """
    if not files:
        return {}
    reader, known = opened(files, shapes)
    sharded = {
        name: places[name]
        for name, stored in known.items()
        if name in places and is_sharded(places[name]) and places[name].shape == stored.size
    }
    shapes_here = {name: local_part(sharded[name]).shape if name in sharded else known[name].size for name in known}
    found = {name: torch.empty(shape, dtype=known[name].properties.dtype) for name, shape in shapes_here.items()}
    metadata = Metadata(state_dict_metadata=dict(known), storage_data=reader.storage_data)
    planner = Targets(found | sharded, found, metadata)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return found | {name: Piece.of(place, found[name]) for name, place in sharded.items()}


def opened(
    files: Sequence[Path], shapes: Shapes | None
) -> tuple[HuggingFaceStorageReader, dict[str, TensorStorageMetadata]]:
    """Returns a reader of some files and the metadata of their tensors by name. Arguments and errors as in `read`."""
    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = ListedFiles(files)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    known: dict[str, TensorStorageMetadata] = dict(metadata.state_dict_metadata)  # ty: ignore[invalid-assignment]
    for name, stored in known.items():
        # DCP itself would leave uncovered elements uninitialized.
        there = sum(math.prod(piece.sizes) for piece in stored.chunks)
        if there != math.prod(stored.size) or (shapes is not None and list(stored.size) != shapes[name]):
            raise ValueError(f"the stored pieces of '{name}' do not cover the tensor")
    return reader, known
