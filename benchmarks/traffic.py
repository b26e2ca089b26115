"""What a step sends and what a rank holds, as a formula: bytes, messages and memory for any model and number of ranks.

    python benchmarks/traffic.py

    ddp    gradients, an all-reduce a bucket, once a step
    fsdp   weights, an all-gather a block for each forward and each backward pass; gradients, a reduce-scatter a block,
           once a step
    both   one small all-gather of a row of numbers (`stabletrain/parallel/distributed.py`), and BatchNorm's
           statistics, one all-reduce

All of it is fp32, as weights are, but with `precision=bf16_params`. A collective goes round a ring, as NCCL's and
gloo's do: of B bytes over W ranks each rank sends B (W-1)/W to all-gather or to reduce-scatter and twice that to
all-reduce, in W-1 messages or 2 (W-1). NCCL may take a tree instead, for few bytes or many ranks: fewer messages,
about as many bytes.

Which collectives a step has, of what sizes, and what a rank holds, `tests/parallel/test_traffic.py` compares with two
ranks that train. The command prints the table of docs/scaling.md.

Sources: Li et al., arXiv 2006.15704 (DDP's buckets); Zhao et al., arXiv 2304.11277 (FSDP); Patarasuk and Yuan 2009
(the ring).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from stabletrain.parallel.distributed import HEAD
from stabletrain.parallel.fsdp import blocks

FP32 = 4
"""Bytes of a number."""

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DDP closes its first bucket, and each other one."""

ADAMW = 2
"""Moments that AdamW keeps for each weight; SGD with momentum keeps 1."""

Shape = tuple[int, ...]


class Sizes(NamedTuple):
    """What of a model matters here.

    Attributes:
        shapes: of its parameters, in their order; all are trained.
        groups: for each of them the number of its block, which FSDP gathers at a time; 0 for what is in no block.
        buffers: floats that every step averages over the ranks: BatchNorm's statistics.
    """

    shapes: tuple[Shape, ...]
    groups: tuple[int, ...]
    buffers: int = 0

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(math.prod(shape) for shape in self.shapes)

    def by_group(self) -> dict[int, list[Shape]]:
        """The shapes of each group."""
        found: dict[int, list[Shape]] = {}
        for shape, group in zip(self.shapes, self.groups, strict=True):
            found.setdefault(group, []).append(shape)
        return found


def of(model: nn.Module) -> Sizes:
    """The sizes of a model before it is sharded; it may lie on the device `meta`."""
    group: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks(model), 1):
        for parameter in block.parameters():
            group.setdefault(parameter, number)
    kept = model.state_dict().keys()
    buffers = [b.numel() for name, b in model.named_buffers() if name in kept and b.is_floating_point()]
    parameters = list(model.parameters())
    return Sizes(tuple(tuple(p.shape) for p in parameters), tuple(group.get(p, 0) for p in parameters), sum(buffers))


def gpt(layers: int, width: int, vocabulary: int, context: int) -> Sizes:
    """GPT-2's layout at any size, as `model=gpt2` builds it: learned positions, biases, a head without weights."""
    square, vector, up, wide = (width, width), (width,), (4 * width, width), (4 * width,)
    attention = [vector, vector, *[square, vector] * 4]
    mlp = [vector, vector, up, wide, (width, 4 * width), vector]
    inside = [(shape, layer) for layer in range(1, layers + 1) for shape in attention + mlp]
    outside = [((vocabulary, width), 0), ((context, width), 0)]
    shapes, groups = zip(*outside, *inside, (vector, 0), (vector, 0), strict=True)
    return Sizes(shapes, groups)


class Collective(NamedTuple):
    """One call that all ranks make together.

    Attributes:
        kind: `all_reduce`, `all_gather` or `reduce_scatter`.
        bytes: of the whole: what is reduced, or what each rank has gathered in the end.
    """

    kind: str
    bytes: int

    def rounds(self) -> int:
        """Times that the whole goes round the ring."""
        return 2 if self.kind == "all_reduce" else 1

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends; it receives as many."""
        return self.rounds() * self.bytes * (ranks - 1) / ranks

    def messages(self, ranks: int) -> int:
        """Messages that a rank sends, were none cut into pieces."""
        return self.rounds() * (ranks - 1)


def ddp(sizes: Sizes, ranks: int) -> list[Collective]:
    """A step of `parallel=ddp`, from its second step on; gradient accumulation adds nothing."""
    buckets = [Collective("all_reduce", filled) for filled in bucketed(sizes.shapes)]
    return [*buckets, *statistics(sizes), row(1, ranks)]


def fsdp(sizes: Sizes, ranks: int, micro_batches: int = 1, reshard_after_forward: bool = True) -> list[Collective]:
    """A step of `parallel=fsdp`."""
    parts = [FP32 * ranks * part(shapes, ranks) for shapes in sizes.by_group().values()]
    passes = micro_batches * (2 if reshard_after_forward else 1)
    gathers = [Collective("all_gather", whole) for whole in parts] * passes
    scatters = [Collective("reduce_scatter", whole) for whole in parts]
    return [*gathers, *scatters, *statistics(sizes), row(len(sizes.shapes), ranks)]


def bucketed(shapes: Sequence[Shape]) -> list[int]:
    """Bytes of DDP's buckets: filled in the order in which gradients come, the last parameter's first."""
    found, filled = [], 0
    for shape in reversed(shapes):
        filled += FP32 * math.prod(shape)
        if filled >= (BUCKET if found else FIRST_BUCKET):
            found, filled = [*found, filled], 0
    return [*found, filled] if filled else found


def part(shapes: Iterable[Shape], ranks: int) -> int:
    """Numbers of a rank's part: whole rows of each tensor, as many on every rank, so that the last may be padding."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def statistics(sizes: Sizes) -> list[Collective]:
    """The all-reduce of BatchNorm's statistics, where there are any."""
    return [Collective("all_reduce", FP32 * sizes.buffers)] if sizes.buffers else []


def row(numbers: int, ranks: int) -> Collective:
    """The small all-gather: a row of each rank, with `numbers` that tell of its gradients."""
    return Collective("all_gather", FP32 * ranks * (HEAD + numbers))


class Memory(NamedTuple):
    """Bytes that a rank holds, activations apart.

    Attributes:
        weights, gradients, moments: its own, or its part of them.
        whole: on the card as well while a step runs. DDP: the buckets, copies of all gradients. FSDP: gathered weights
            and gradients not yet scattered, of what is in no block and of two blocks, one in use and one on its way;
            of everything, where they are kept. A collective's own buffers come on top.
        state: a snapshot, on the host.
    """

    weights: int
    gradients: int
    moments: int
    whole: int
    state: int

    @property
    def card(self) -> int:
        """All but the snapshot."""
        return self.weights + self.gradients + self.moments + self.whole


def held_by_ddp(sizes: Sizes, moments: int = ADAMW) -> Memory:
    """Of a rank of `parallel=ddp`: the same for any number of ranks."""
    own, statistic = FP32 * sizes.parameters, FP32 * sizes.buffers
    return Memory(own, own, moments * own, own, (1 + moments) * own + statistic)


def held_by_fsdp(
    sizes: Sizes, ranks: int, micro_batches: int = 1, reshard_after_forward: bool = True, moments: int = ADAMW
) -> Memory:
    """Of a rank of `parallel=fsdp`, with padding: gradients that wait for the last micro-batch are whole."""
    own, statistic = FP32 * part(sizes.shapes, ranks), FP32 * sizes.buffers
    groups = {group: FP32 * ranks * part(shapes, ranks) for group, shapes in sizes.by_group().items()}
    outside = groups.pop(0, 0)
    some, everything = outside + sum(sorted(groups.values())[-2:]), outside + sum(groups.values())
    gathered = some if reshard_after_forward else everything
    unscattered = some if micro_batches == 1 else everything
    return Memory(own, own, moments * own, gathered + unscattered, (1 + moments) * own + statistic)


# ---- the tables of docs/scaling.md


class Example(NamedTuple):
    """A model of the tables: GPT-3's sizes (arXiv 2005.14165, table 2.1), and sequences that a card takes at a time."""

    name: str
    sizes: Sizes
    context: int
    at_once: int


EXAMPLES = (
    Example("124M", gpt(12, 768, 50257, 1024), 1024, 16),
    Example("1.3B", gpt(24, 2048, 50257, 2048), 2048, 8),
    Example("7B", gpt(32, 4096, 50257, 2048), 2048, 2),
)
CARDS = (8, 64, 256, 1024)
SEQUENCES = 1024
"""Of a step, over all cards."""

NODE, NVLINK, INFINIBAND = 8, 450e9, 50e9
"""Cards of a machine, and bytes a second that each sends: to the others of its machine, or where there are several."""

FLOPS = 0.40 * 989e12
"""Of an H100 in bf16, at 40 % of its peak."""


def line(example: Example, kind: str, cards: int) -> str:
    """A line of the table."""
    sizes, sequences = example.sizes, SEQUENCES // cards
    micro_batches = -(-sequences // example.at_once)
    if kind == "ddp":
        calls, held = ddp(sizes, cards), held_by_ddp(sizes)
    else:
        calls, held = fsdp(sizes, cards, micro_batches), held_by_fsdp(sizes, cards, micro_batches)
    sent = sum(call.sent(cards) for call in calls)
    sending = sent / (NVLINK if cards <= NODE else INFINIBAND)
    computing = 6 * sizes.parameters * sequences * example.context / FLOPS
    return (
        f"| {example.name} | {kind} | {cards:,} | {micro_batches} | {len(calls):,} "
        f"| {sum(call.messages(cards) for call in calls):,} | {sent / 1e9:,.2f} | {calls[-1].sent(cards) / 1e3:,.1f} "
        f"| {held.card / 1e9:,.1f} | {held.state / 1e9:,.2f} "
        f"| {1e3 * sending:,.0f} | {1e3 * computing:,.0f} | {sending / computing:.0%} |"
    )


HEADS = (
    *("model", "parallel", "cards", "micro-batches", "collectives", "messages", "GB sent", "kB of the small gather"),
    *("GB on the card", "GB of a snapshot", "ms to send", "ms to compute", "send / compute"),
)


def main() -> None:
    """Prints the table."""
    print(f"| {' | '.join(HEADS)} |")
    print("|---" * len(HEADS) + "|")
    for example in EXAMPLES:
        for kind in ("ddp", "fsdp"):
            for cards in CARDS:
                print(line(example, kind, cards))


if __name__ == "__main__":
    main()
