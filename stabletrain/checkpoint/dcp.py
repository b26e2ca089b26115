"""Tensors of which each rank has a part, written and read by PyTorch's distributed checkpoints, without a pickle.

DCP knows which part of a tensor is whose (`DefaultSavePlanner`), and of which stored pieces a rank's part is made,
whatever number of ranks wrote them (`DefaultLoadPlanner`). Its usual format keeps that in a pickle; its safetensors
format keeps the place of every piece in the JSON header of the file that holds it (`hf_storage.py`, PyTorch 2.11), and
reads safetensors files of any other program as pieces that are whole.

`dcp.save` and `dcp.load` would have the ranks meet, which a background thread must not, to agree on who writes what is
on all of them. Here that is rank 0, so that every rank knows its own part of the plan; and so their planner, writer
and reader are called one by one.
"""

import io
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stabletrain.checkpoint.tree import is_sharded, to_host

WriteFile = Callable[[Path, Iterable[bytes | memoryview]], dict[str, Any]]
"""Writes a file and returns its entry in the manifest: `disk.write_file`."""


Shapes = Mapping[str, Sequence[int]]
"""Of whole tensors, by name."""


class Copies(DefaultSavePlanner):
    """What one rank writes: planned by the tensors as they live, and copied to the host at once.

    Attributes:
        copies: by name: of a sharded tensor this rank's part; all others on rank 0 only.

    Args:
        tensors: the same names on every rank, in any memory.
        rank: this one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        first = rank == 0
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        mine = {
            name: tensors[name] for name, part in parts.items() if first or (is_sharded(tensors[name]) and part.numel())
        }
        self.set_up_planner(mine, is_coordinator=first)
        self.create_local_plan()
        self.state_dict = {}  # what lives may change, and need not stay in memory
        self.copies: dict[str, Tensor] = to_host({name: parts[name] for name in mine})

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """What DCP writes in place of what it has planned for."""
        return self.copies[index.fqn]

    def write(self, folder: Path, rank: int, count: int, write_file: WriteFile) -> dict[str, dict[str, Any]]:
        """Writes this rank's file into `folder`, or none where it has nothing; returns the file's entry by its name.

        Raises:
            OSError: the disk is full or gone.
        """
        files = FileHandoff(write_file)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        writer.fs, writer.sync_files, writer.per_thread_copy_ahead = files, False, 0  # `write_file` synchronises
        plan = writer.prepare_global_plan([self.plan] * count)[rank]
        writer.write_data(self.finish_plan(plan), self).wait()
        return files.entries


class FileHandoff(FileSystem):
    """Files whose content is handed to a function when it is complete.

    Attributes:
        entries: what the function returned, by the file's name.
    """

    def __init__(self, write_file: WriteFile) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self._write_file = write_file

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        """A stream to write to; nothing is copied."""
        del mode
        content = ByteStream()
        yield content
        self.entries[Path(path).name] = self._write_file(Path(path), content.pieces)


class ByteStream(io.RawIOBase):
    """A stream that keeps what is written to it, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        """Keeps `piece`."""
        self.pieces.append(piece)
        return len(piece)

    def tell(self) -> int:
        """Bytes so far."""
        return sum(map(len, self.pieces))


class ListedFiles(FileSystem):
    """A folder in which nothing is but `files`: what else somebody has laid there is not read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        """The paths of the files."""
        del path
        return [str(file) for file in self._files]


def read(files: Sequence[Path], shapes: Shapes | None, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of some safetensors files: as this rank has them of sharded tensors, whole and on the CPU of others.

    Args:
        files: written by any number of ranks, or by one process.
        shapes: of all tensors, by name; None where one process has written them whole.
        places: by name a tensor whose placement, device and memory format are those of the one that is read; its dtype
            need not be. Without one, and where shapes differ, a tensor is read whole.

    Raises:
        ValueError: the pieces of a tensor do not make it up.
        SafetensorError, KeyError, TypeError, RuntimeError: a file does not hold what it should.
    """
    if not files:
        return {}
    reader, known = opened(files, shapes)
    found: dict[str, Tensor] = {}
    for name, stored in known.items():
        place, dtype = places.get(name), stored.properties.dtype
        fits = place is not None and place.shape == stored.size
        found[name] = torch.empty_like(place, dtype=dtype) if fits else torch.empty(stored.size, dtype=dtype)
    metadata = Metadata(state_dict_metadata=dict(known), storage_data=reader.storage_data)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(found, metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return found


def opened(
    files: Sequence[Path], shapes: Shapes | None
) -> tuple[HuggingFaceStorageReader, dict[str, TensorStorageMetadata]]:
    """A reader of some files, and what they hold by name; takes and raises what `read` does."""
    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = ListedFiles(files)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    known: dict[str, TensorStorageMetadata] = dict(metadata.state_dict_metadata)  # ty: ignore[invalid-assignment]
    for name, stored in known.items():
        there = sum(math.prod(piece.sizes) for piece in stored.chunks)
        if there != math.prod(stored.size) or (shapes is not None and list(stored.size) != shapes[name]):
            raise ValueError(f"the pieces of '{name}' do not make it up")
    return reader, known


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor
