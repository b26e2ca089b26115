"""The formula of traffic and memory equals what two ranks in training really send and hold.

The runs are made once, by torchrun: `python -m tests.test_benchmarks_of_traffic <folder>` on each rank. A dispatch mode
sees every collective that the loop calls between the beginnings of two steps, and of what size; the sizes of what it
holds are read off the model, its optimizer and a snapshot.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import traffic
from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.tree import Piece, is_sharded
from stabletrain.config.make import Choice
from stabletrain.records import TrainState
from stabletrain.trainer.contract import make_model
from stabletrain.trainer.options import ForwardOptions, read
from tests.parallel.launches import forked
from tests.runs import CONF, ROOT, TINY_GPT, TINY_RESNET, composed

pytestmark = pytest.mark.slow

RANKS = 2
SMALL = [
    "steps=5",
    "warmup.steps=1",
    "eval_every=99",
    "checkpoint=off",
    "monitors=none",
    "forensics=off",
    "report=false",
]
UNEVEN = ["model.n_head=1", "model.n_embd=17", "model.position=learned"]
"""Widths that are not divisible by two ranks."""

CASES: dict[str, list[str]] = {
    "ddp": [*TINY_GPT, "parallel=ddp"],
    "ddp, micro-batches": [*TINY_GPT, "parallel=ddp", "grad_accum_steps=2"],
    "ddp, several buckets": [*TINY_GPT, "parallel=ddp", "model.n_embd=176", "model.n_layer=3"],
    "ddp, BatchNorm": [*TINY_RESNET, "parallel=ddp"],
    "fsdp": [*TINY_GPT, *UNEVEN, "parallel=fsdp", "precision=fp32"],
    "fsdp, micro-batches": [*TINY_GPT, *UNEVEN, "parallel=fsdp", "grad_accum_steps=2"],
    "fsdp, kept": [*TINY_GPT, *UNEVEN, "parallel=fsdp", "parallel.reshard_after_forward=false", "grad_accum_steps=2"],
    "fsdp, BatchNorm": [*TINY_RESNET, "parallel=fsdp"],
    "fsdp, bf16": [*TINY_GPT, *UNEVEN, "parallel=fsdp", "grad_accum_steps=2", "precision=bf16"],
}

COPIES = {"hsdp": [*TINY_GPT, *UNEVEN, "parallel=hsdp", "parallel.shard=2", "precision=fp32"]}
"""Two copies, each of two ranks."""

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


# ---- on each rank


class Seen(TorchDispatchMode):
    """Counts collectives by kind and by the bytes of the largest tensor, which is the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith(("c10d", "_c10d_functional")):
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls[f"{KINDS.get(func._schema.name, func._schema.name)} {max(sizes, default=0)}"] += 1
        return func(*args, **(kwargs or {}))


def train(overrides: list[str], folder: Path) -> dict[str, Any]:
    """What one step of the run sends, and the memory the rank holds after it."""
    from stabletrain.trainer import loop, step_graph
    from stabletrain.trainer.build import build

    found: dict[str, Any] = {}
    sys.argv[1:] = overrides
    with composed(*overrides) as cfg:
        job = build(cfg, folder)
    compute, seen = step_graph.compute, Seen()

    def counted(state: TrainState, *rest: Any) -> Any:
        if state.step == 3:  # from the second step on DDP has the buckets that it keeps
            seen.calls.clear()
        if state.step == 4:
            found["calls"], found["held"] = dict(seen.calls), held(state)
            found["views"] = getattr(getattr(job.parallel, "_wrapped", None), "gradient_as_bucket_view", None)
        return compute(state, *rest)

    vars(step_graph)["compute"] = counted
    try:
        with seen:
            loop.train(job)
    finally:
        vars(step_graph)["compute"] = compute
    return found


def held(state: TrainState) -> dict[str, int]:
    """Bytes of each kind, as `traffic.Memory` names them."""
    snapshots = Snapshots()
    snapshots.take(0, capture(state, {}), state)
    tree = snapshots.newest(0)
    kept = [*tree["model"].values(), *moments(tree["optimizer"]["state"])]
    parameters = list(state.model.parameters())
    return {
        "weights": nbytes(parameters),
        "gradients": nbytes([parameter.grad for parameter in parameters]),
        "moments": nbytes(moments(state.optimizer.state)),
        "state": nbytes(kept),
    }


def moments(states: Mapping[Any, Mapping[str, Any]]) -> list[Any]:
    """The optimizer state of a parameter, without its step counter."""
    return [value for values in states.values() for key, value in values.items() if key != "step"]


def nbytes(tensors: list[Any]) -> int:
    """Bytes of this rank's shards; step counters are excluded."""
    parts = [each.local if isinstance(each, Piece) else each for each in tensors]
    local = [part.to_local() if is_sharded(part) else part for part in parts]
    return sum(part.nbytes for part in local if part.is_floating_point())


# ---- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 has seen of every case."""
    folder = tmp_path_factory.mktemp("traffic")
    forked(RANKS, "-m", "tests.test_benchmarks_of_traffic", str(folder), cwd=ROOT, logs=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found_of_copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 has seen of two copies."""
    folder = tmp_path_factory.mktemp("copies")
    forked(2 * RANKS, "-m", "tests.test_benchmarks_of_traffic", str(folder), cwd=ROOT, logs=folder)
    return json.loads((folder / "found.json").read_text())


def sizes_of(overrides: list[str]) -> traffic.Sizes:
    """The sizes of a configuration's model, without allocating it."""
    with composed(*overrides) as cfg, torch.device("meta"):
        options = read(ForwardOptions, cfg)
        data = Choice.of(cfg, "data").build()
        model = make_model(options.model, data, options.objective)
        return traffic.of(model, options.precision.build(device=torch.device("cpu")).casts(model))


def expected(case: list[str]) -> tuple[list[traffic.Collective], traffic.Memory]:
    """The formula's answer."""
    sizes = sizes_of(case)
    micro_batches = 2 if "grad_accum_steps=2" in case else 1
    if "parallel=ddp" in case:
        return traffic.ddp(sizes, RANKS), traffic.held_by_ddp(sizes, micro_batches)
    how = (RANKS, micro_batches, "parallel.reshard_after_forward=false" not in case)
    return traffic.fsdp(sizes, *how), traffic.held_by_fsdp(sizes, *how)


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_the_formula_says(name: str, found: dict[str, Any]):
    calls, _ = expected(CASES[name])
    assert found[name]["calls"] == Counter(f"{call.kind} {call.bytes}" for call in calls)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_the_formula_says(name: str, found: dict[str, Any]):
    _, memory = expected(CASES[name])
    held = found[name]["held"]
    assert held == {key: getattr(memory, key) for key in held}


def test_copies_send_and_hold_what_the_formula_says(found_of_copies: dict[str, Any]):
    sizes, seen = sizes_of(COPIES["hsdp"]), found_of_copies["hsdp"]
    hybrid, memory = traffic.hsdp(sizes, 2, RANKS), traffic.held_by_fsdp(sizes, RANKS)
    calls = [*hybrid.within, *hybrid.between, *hybrid.all]
    assert seen["calls"] == Counter(f"{call.kind} {call.bytes}" for call in calls)
    assert seen["held"] == {key: getattr(memory, key) for key in seen["held"]}


def test_gradients_lie_in_the_buckets(found: dict[str, Any]):
    """If they were copies, `Memory.whole` would not be 0."""
    assert found["ddp"]["views"] is True


def test_the_cases_are_not_trivial(found: dict[str, Any]):
    def count(name: str) -> int:
        return sum(found[name]["calls"].values())

    assert count("ddp") == 2  # one bucket and the row
    assert count("ddp, several buckets") > 2
    assert count("ddp, micro-batches") == count("ddp")
    assert count("fsdp") < count("fsdp, micro-batches")
    assert count("fsdp, kept") < count("fsdp, micro-batches")


def test_ring():
    """Closed forms at four ranks: each sends 3/4 of the whole per pass around the ring."""
    assert traffic.Collective("all_gather", 400).sent(4) == traffic.Collective("reduce_scatter", 400).sent(4) == 300
    assert traffic.Collective("all_reduce", 400).sent(4) == 600
    assert traffic.Collective("all_reduce", 400).messages(4) == 6
    assert traffic.Collective("all_gather", 400).sent(1) == traffic.Collective("all_gather", 400).messages(1) == 0


def test_gpt_is_the_model_that_the_configuration_builds():
    sizes = sizes_of(["precision=fp32", "model=gpt2", "model.vocab_size=300", "data.block_size=64"])
    assert traffic.gpt(12, 768, 300, 64) == sizes
    assert round(traffic.gpt(12, 768, 50257, 1024).parameters, -5) == 124_400_000


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_every_model_can_be_asked(name: str):
    data = "stdlib" if name.startswith(("gpt", "llama")) else "digits"
    sizes = sizes_of(["precision=fp32", f"model={name}", f"data={data}"])
    alone, many = traffic.fsdp(sizes, 1), traffic.fsdp(sizes, 64)
    assert sum(traffic.bucketed(sizes.shapes)) == 4 * sizes.parameters
    gathered = [sum(call.bytes for call in calls if call.kind == "reduce_scatter") for calls in (alone, many)]
    assert gathered[0] == 4 * sizes.parameters <= gathered[1]  # padding
    assert all(call.sent(1) == 0 for call in alone)


def test_pytorchs_tracker_finds_what_the_formula_says_a_rank_holds(tmp_path: Path):
    """`benchmarks/sharded_memory.py` at a small size, with shared heads of keys and rows that 2 does not divide."""
    small = ["--layers", "3", "--width", "24", "--vocabulary", "65", "--block", "8", "--json", "found.json"]
    forked(RANKS, str(ROOT / "benchmarks" / "sharded_memory.py"), *small, cwd=tmp_path, logs=tmp_path)
    first, last = json.loads((tmp_path / "found.json").read_text())["results"]
    counters = 4 * (3 * 9 + 3)  # AdamW's step number of each tensor
    for kind, more in (("weights", 0), ("gradients", 0), ("moments", counters)):
        assert first["most"][kind] == first["computed"][kind] + more, kind
        assert last["most"][kind] <= first["most"][kind], kind  # a row less of some tensors
    assert 0 < first["most"]["whole"] <= first["computed"]["whole"]
    assert first["losses"][0] > first["losses"][-1]


@pytest.mark.parametrize("ranks", [2, 7, 64])
def test_parts_cover_the_whole(ranks: int):
    """No rank holds less than its share, and padding is at most a row of each tensor per rank."""
    sizes = traffic.gpt(2, 24, 100, 16)
    padded = ranks * traffic.part(sizes.shapes, ranks)
    rows = sum(ranks * shape[-1] if len(shape) > 1 else ranks for shape in sizes.shapes)
    assert sizes.parameters <= padded < sizes.parameters + rows


def test_the_command_prints_a_line_for_each_case(capsys: pytest.CaptureFixture[str]):
    traffic.main()
    head, rule, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(traffic.EXAMPLES) * (3 * len(traffic.CARDS) - 1), "hsdp needs two machines"
    assert {len(line.split("|")) for line in (head, rule, *lines)} == {15}


def test_the_page_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    traffic.main()
    assert capsys.readouterr().out in (ROOT / "docs" / "evidence" / "scaling.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    cases = CASES if os.environ["WORLD_SIZE"] == str(RANKS) else COPIES
    results = {name: train(case + SMALL, where / str(number)) for number, (name, case) in enumerate(cases.items())}
    if os.environ["RANK"] == "0":
        (where / "found.json").write_text(json.dumps(results))
    from stabletrain.parallel.ranks import exit_process, leave_process_group

    leave_process_group()
    exit_process(0)
