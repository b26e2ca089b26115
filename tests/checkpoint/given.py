"""A run's checkpoints, as the tests of what is on the disk need them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.checkpoint.reader import Checkpoint

FILES = ["model.safetensors", "training.safetensors", "state.json", "manifest.json"]
"""In the order in which they are written."""


def tree(step: int, weight: float | None = None) -> dict:
    """A state that differs from that of any other step; or one with other weights."""
    return {
        "model": {"w": torch.full((64, 8), float(step if weight is None else weight))},
        "optimizer": {"state": {}},
        "step": step,
    }


class Run:
    """Checkpoints of a run folder, and what they reported."""

    def __init__(self, folder: Path, run: str | None = None, **options) -> None:
        self.events: list[tuple[str, int, dict]] = []
        policy: dict[str, Any] = {"every": 10, "keep": 2, "keep_best": True, "asynchronous": False}
        self.checkpoints = Checkpoints(**(policy | options))
        self.checkpoints.open(folder, lambda *event: self.events.append(event), run)
        self.folder = folder / "checkpoints"
        self.info = {} if run is None else {"run": run}

    def save(self, step, healthy=True, val_loss=None, **kwargs):
        state = kwargs.get("tree", tree(step))
        self.checkpoints.save(step, state, info=self.info, healthy=healthy, val_loss=val_loss)

    def newest(self, **options) -> Checkpoint:
        found = self.checkpoints.newest(**options)
        assert found is not None
        return found

    def preferred(self) -> Checkpoint:
        found = self.checkpoints.preferred()
        assert found is not None
        return found

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self):
        return sorted(int(path.name[5:]) for path in self.folder.iterdir())


def flip(path: Path, byte: int | None = None, bit: int = 0) -> None:
    """Flips one bit of a file; by default in the middle byte."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= 1 << bit
    path.write_bytes(content)


def rewrite_manifest(checkpoint: Path, **changes) -> None:
    """Forges a manifest: changes values, with a checksum that matches."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_bytes(reader.render(manifest))


def forge(checkpoint: Path, contents: dict[str, bytes]) -> None:
    """Replaces files, and updates the manifest to match."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for name, content in contents.items():
        (checkpoint / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": reader.hashlib.sha256(content).hexdigest()}
    rewrite_manifest(checkpoint, files=files)


@contextmanager
def as_rank(rank: int, count: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Makes this process one of `count` ranks that do not communicate; yields a function that shards a tensor.

    As in FSDP, a rank's shard is some rows of the tensor, or none.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        # PyTorch caches by mesh, and the meshes of all ranks would be equal: the name tells them apart.
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=(f"rank_{rank}",))

        def shard(whole: Tensor) -> Tensor:
            parts = whole.chunk(count)
            part = parts[rank] if rank < len(parts) else whole[:0]
            shape, stride = whole.shape, whole.stride()
            return DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

        yield shard
    finally:
        distributed.destroy_process_group()
