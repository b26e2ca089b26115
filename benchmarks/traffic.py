"""What a step sends and what a rank holds: bytes, messages and memory for any model and number of ranks, by formula.

    python benchmarks/traffic.py

    ddp    gradients: one all-reduce per bucket, once per step
    fsdp   weights: one all-gather per block for each forward and each backward pass, and for the modules outside of
           blocks for each forward pass; gradients: one reduce-scatter per block, once per step
    hsdp   as fsdp, among the ranks of a copy; then one all-reduce per block of each rank's gradients among the copies
    all    one small all-gather of a row of numbers (`stabletrain/parallel/distributed.py`), and one all-reduce of
           BatchNorm's statistics; with fsdp and hsdp one all-reduce of the lengths of update and weights

Everything is fp32, as the weights are; but with `precision=bf16` and `fp16`, fsdp gathers the weights of linear layers
and convolutions in half of the bytes. `precision=bf16_params` is not covered. Collectives use a ring, as NCCL's and
gloo's do: of B bytes over W ranks, each rank sends B (W-1)/W to all-gather or reduce-scatter, in W-1 messages, and
twice that to all-reduce, in 2 (W-1). NCCL may use a tree for few bytes or many ranks: fewer messages, about the same
bytes.

`tests/test_benchmarks_of_traffic.py` compares the collectives, their sizes and the memory with two ranks that train,
for hsdp with four.
The command prints the table of docs/evidence/scaling.md.

Sources: Li et al., arXiv 2006.15704 (DDP's buckets); Zhao et al., arXiv 2304.11277 (FSDP); Patarasuk and Yuan 2009
(the ring).
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from stabletrain.parallel.fsdp import blocks

HEAD = 8
"""Numbers in a row before those of the gradients: loss, its two terms, bad data, changed state, inputs, buffers,
stop request."""

LENGTHS = 2
"""Lengths of the update and of the weights, which fsdp adds up over the ranks for the search for slow spikes."""

FP32 = 4
"""Bytes per number."""

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Sizes in bytes at which DDP closes its first bucket and every other one."""

ADAMW = 2
"""Moments per weight in AdamW; SGD with momentum has 1."""

Shape = tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of a model's tensors.

    Attributes:
        shapes: of the parameters, in their order; all are trained.
        groups: for each parameter the number of its block, which FSDP gathers as a unit; 0 if it is in no block.
        buffers: number of floats averaged over the ranks in every step: BatchNorm's statistics.
        casts: for each parameter whether fsdp gathers it in two bytes a number; empty if none is.
    """

    shapes: tuple[Shape, ...]
    groups: tuple[int, ...]
    buffers: int = 0
    casts: tuple[bool, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def by_group(self) -> dict[int, list[Shape]]:
        """Returns the shapes of each group."""
        found: dict[int, list[Shape]] = {}
        for shape, group in zip(self.shapes, self.groups, strict=True):
            found.setdefault(group, []).append(shape)
        return found


def of(model: nn.Module, casts: Collection[str] = ()) -> Sizes:
    """Returns the sizes of a model that is not sharded yet; it may be on the device `meta`.

    Args:
        casts: names of the weights that fsdp gathers in two bytes a number, see `FullPrecision.casts`.
    """
    group: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks(model), 1):
        for parameter in block.parameters():
            group.setdefault(parameter, number)
    kept = model.state_dict().keys()
    buffers = [b.numel() for name, b in model.named_buffers() if name in kept and b.is_floating_point()]
    parameters = list(model.parameters())
    cast = tuple(name in casts for name, _ in model.named_parameters()) if casts else ()
    groups = tuple(group.get(p, 0) for p in parameters)
    return Sizes(tuple(tuple(p.shape) for p in parameters), groups, sum(buffers), cast)


def gpt(layers: int, width: int, vocabulary: int, context: int) -> Sizes:
    """Returns the sizes of a GPT-2 layout as `model=gpt2` builds it: learned positions, biases, tied head."""
    square, vector, up, wide = (width, width), (width,), (4 * width, width), (4 * width,)
    attention = [vector, vector, *[square, vector] * 4]
    mlp = [vector, vector, up, wide, (width, 4 * width), vector]
    inside = [(shape, layer) for layer in range(1, layers + 1) for shape in attention + mlp]
    outside = [((vocabulary, width), 0), ((context, width), 0)]
    shapes, groups = zip(*outside, *inside, (vector, 0), (vector, 0), strict=True)
    return Sizes(shapes, groups)


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: `all_reduce`, `all_gather` or `reduce_scatter`.
        bytes: size of the full tensor: what is reduced, or what each rank has gathered at the end.
    """

    kind: str
    bytes: int

    def rounds(self) -> int:
        """Returns how many times the full tensor goes round the ring."""
        return 2 if self.kind == "all_reduce" else 1

    def sent(self, ranks: int) -> float:
        """Returns the bytes that a rank sends; it receives as many."""
        return self.rounds() * self.bytes * (ranks - 1) / ranks

    def messages(self, ranks: int) -> int:
        """Returns the number of messages that a rank sends, if none is split into chunks."""
        return self.rounds() * (ranks - 1)


def ddp(sizes: Sizes, ranks: int) -> list[Collective]:
    """Returns the collectives of a `parallel=ddp` step, from the second step on; gradient accumulation adds none."""
    buckets = [Collective("all_reduce", filled) for filled in bucketed(sizes.shapes)]
    return [*buckets, *statistics(sizes), row(1, ranks)]


def fsdp(sizes: Sizes, ranks: int, micro_batches: int = 1, reshard_after_forward: bool = True) -> list[Collective]:
    """Returns the collectives of a `parallel=fsdp` step."""
    again = reshard_after_forward
    parts = [FP32 * ranks * part(shapes, ranks) for shapes in sizes.by_group().values()]
    gathers = [Collective("all_gather", size) for size in gathered(sizes, ranks).values()]
    gathers += [Collective("all_gather", size) for group, size in gathered(sizes, ranks).items() if group and again]
    gathers *= micro_batches
    scatters = [Collective("reduce_scatter", whole) for whole in parts]
    lengths = Collective("all_reduce", FP32 * LENGTHS)
    return [*gathers, *scatters, *statistics(sizes), row(len(sizes.shapes), ranks), lengths]


class Hybrid(NamedTuple):
    """The collectives of a `parallel=hsdp` step by the ranks that take part.

    Attributes:
        within: among the ranks of a copy.
        between: among the ranks that have the same shards, one of each copy.
        all: among all ranks.
    """

    within: list[Collective]
    between: list[Collective]
    all: list[Collective]


def hsdp(sizes: Sizes, copies: int, shards: int, micro_batches: int = 1, reshard_after_forward: bool = True) -> Hybrid:
    """Returns the collectives of a `parallel=hsdp` step of copies x shards ranks."""
    of_all = [*statistics(sizes), row(len(sizes.shapes), copies * shards)]
    *sharded, lengths = fsdp(sizes._replace(buffers=0), shards, micro_batches, reshard_after_forward)
    within = [*sharded[:-1], lengths]  # without its row
    between = [Collective("all_reduce", FP32 * part(shapes, shards)) for shapes in sizes.by_group().values()]
    return Hybrid(within, between, of_all)


def gathered(sizes: Sizes, ranks: int) -> dict[int, int]:
    """Returns the bytes of each group's whole weights as fsdp gathers them, with padding."""
    found = dict.fromkeys(sizes.by_group(), 0)
    for number, (shape, group) in enumerate(zip(sizes.shapes, sizes.groups, strict=True)):
        size = FP32 // 2 if sizes.casts and sizes.casts[number] else FP32
        found[group] += size * ranks * part([shape], ranks)
    return found


def bucketed(shapes: Sequence[Shape]) -> list[int]:
    """Returns the bytes of DDP's buckets, filled in the order of the gradients: the last parameter's first."""
    found, filled = [], 0
    for shape in reversed(shapes):
        filled += FP32 * math.prod(shape)
        if filled >= (BUCKET if found else FIRST_BUCKET):
            found, filled = [*found, filled], 0
    return [*found, filled] if filled else found


def part(shapes: Iterable[Shape], ranks: int) -> int:
    """Returns the size of a rank's shard: whole rows of each tensor, equally many on every rank, padded if needed."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def statistics(sizes: Sizes) -> list[Collective]:
    """Returns the all-reduce of BatchNorm's statistics, if there are any."""
    return [Collective("all_reduce", FP32 * sizes.buffers)] if sizes.buffers else []


def row(numbers: int, ranks: int) -> Collective:
    """Returns the small all-gather: one row per rank, with `numbers` statistics of its gradients."""
    return Collective("all_gather", FP32 * ranks * (HEAD + numbers))


class Memory(NamedTuple):
    """Bytes that a rank holds, without activations.

    Attributes:
        weights, gradients, moments: the rank's own copy or shard.
        whole: additionally on the GPU during a step. DDP: nothing, because the gradients lie in the buckets; with
            micro-batches, the gradients that add up beside the buckets until the last one. FSDP: gathered weights
            and gradients not yet scattered, of everything outside blocks and of two blocks, one in use and one in
            transfer; of all blocks if gathered weights are kept. The buffers of the collectives themselves are not
            included.
        state: a snapshot, on the host.
    """

    weights: int
    gradients: int
    moments: int
    whole: int
    state: int

    @property
    def card(self) -> int:
        """Bytes on the GPU: everything but the snapshot."""
        return self.weights + self.gradients + self.moments + self.whole


def held_by_ddp(sizes: Sizes, micro_batches: int = 1, moments: int = ADAMW) -> Memory:
    """Returns what a `parallel=ddp` rank holds; it does not depend on the number of ranks."""
    own, statistic = FP32 * sizes.parameters, FP32 * sizes.buffers
    beside = own if micro_batches > 1 else 0
    return Memory(own, own, moments * own, beside, (1 + moments) * own + statistic)


def held_by_fsdp(
    sizes: Sizes, ranks: int, micro_batches: int = 1, reshard_after_forward: bool = True, moments: int = ADAMW
) -> Memory:
    """Returns what a `parallel=fsdp` rank holds, with padding; gradients waiting for the last micro-batch are
    unsharded.
    """
    own, statistic = FP32 * part(sizes.shapes, ranks), FP32 * sizes.buffers
    groups = {group: FP32 * ranks * part(shapes, ranks) for group, shapes in sizes.by_group().items()}
    weights = some_or_all(gathered(sizes, ranks), everything=not reshard_after_forward)
    unscattered = some_or_all(groups, everything=micro_batches > 1)
    return Memory(own, own, moments * own, weights + unscattered, (1 + moments) * own + statistic)


def some_or_all(groups: dict[int, int], *, everything: bool) -> int:
    """Returns the bytes of the modules outside of blocks and of the two largest blocks, or of everything."""
    inside = sorted(size for group, size in groups.items() if group)
    return groups.get(0, 0) + sum(inside if everything else inside[-2:])


# ---- the tables of docs/evidence/scaling.md


class Example(NamedTuple):
    """A model of the tables, with GPT-3's sizes (arXiv 2005.14165, table 2.1) and the sequences per GPU and
    micro-batch.
    """

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
"""Sequences per step, over all GPUs."""

NODE, NVLINK, INFINIBAND = 8, 450e9, 50e9
"""GPUs per machine, and bytes per second that each sends within a machine, and between several machines."""

FLOPS = 0.40 * 989e12
"""An H100 in bf16 at 40 % of its peak."""


def line(example: Example, kind: str, cards: int) -> str:
    """Returns a line of the table. The copies of hsdp have a machine each."""
    sizes, sequences = example.sizes, SEQUENCES // cards
    in_blocks = zip(sizes.shapes, sizes.groups, strict=True)
    sizes = sizes._replace(casts=tuple(bool(group) and len(shape) == 2 for shape, group in in_blocks))
    micro_batches = -(-sequences // example.at_once)
    within: list[Collective] = []
    between: list[Collective] = []
    if kind == "ddp":
        calls, held = ddp(sizes, cards), held_by_ddp(sizes, micro_batches)
    elif kind == "fsdp":
        calls, held = fsdp(sizes, cards, micro_batches), held_by_fsdp(sizes, cards, micro_batches)
    else:
        within, between, calls = hsdp(sizes, cards // NODE, NODE, micro_batches)
        held = held_by_fsdp(sizes, NODE, micro_batches)
    of_ranks = ((within, NODE), (between, cards // NODE), (calls, cards))
    in_machine, *across = (sum(call.sent(ranks) for call in each) for each, ranks in of_ranks)
    sent = in_machine + sum(across)
    sending = in_machine / NVLINK + sum(across) / (NVLINK if cards <= NODE else INFINIBAND)
    small = [call for call in calls if call.kind == "all_gather"][-1].sent(cards)
    messages = sum(call.messages(ranks) for each, ranks in of_ranks for call in each)
    computing = 6 * sizes.parameters * sequences * example.context / FLOPS
    return (
        f"| {example.name} | {kind} | {cards:,} | {micro_batches} | {len(within) + len(between) + len(calls):,} "
        f"| {messages:,} | {sent / 1e9:,.2f} | {small / 1e3:,.1f} "
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
        for kind in ("ddp", "fsdp", "hsdp"):
            for cards in CARDS[kind == "hsdp" :]:  # on one machine, hsdp is fsdp
                print(line(example, kind, cards))


if __name__ == "__main__":
    main()
