"""Finds the origin in small models with one known fault each, in forward and backward, in three formats."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.trace.origin import find_origin
from stabletrain.forensics.trace.recorder import Call, Trace, source_kind
from stabletrain.forensics.trace.values import Values
from tests.forensics import faulty
from tests.forensics.faulty import Around, Part, line

BF16, FP16 = torch.bfloat16, torch.float16


def traced(part, dtype=None, scale=1.0, inputs=None):
    """One step's trace on a model around `part`, under autocast to `dtype`."""
    model = Around(part)
    torch.manual_seed(1)
    inputs = torch.randn(4, 3) if inputs is None else inputs
    with Trace(model) as trace:
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            out = model(inputs)
        (out.float().square().mean() * scale).backward()
    return trace


class Work(Part):
    """A part without a marked line."""

    def __init__(self, work, value=0.0):
        super().__init__()
        self.work, self.value = work, value


FORWARD = [
    ("LogOfZero", "aten.log", "float32", "log_of_zero"),
    ("LogOfNegative", "aten.log2", "float32", "log_of_negative"),
    ("Log1p", "aten.log1p", "float32", "log_of_zero"),
    ("LogInPlaceOnAView", "aten.log_", "float32", "log_of_zero"),
    ("RootOfNegative", "aten.sqrt", "float32", "root_of_negative"),
    ("Direction", "aten.div", "float32", "zero_over_zero"),
    ("Exp", "aten.exp", "float32", "exp_overflow"),
    ("ExpOfThousand", "aten.exp", "float32", "exp_overflow"),
    ("SoftmaxByHand", "aten.exp", "float32", "exp_overflow"),
    ("SoftplusByHand", "aten.exp", "float32", "exp_overflow"),
    ("NormWithoutEps", "aten.div", "float32", "zero_over_zero"),
    ("PowForward", "aten.pow", "float32", "zero_to_negative_power"),
    ("ArccosForward", "aten.acos", "float32", "outside_domain"),
    ("MaskedRow", "aten._softmax", "float32", "masked_row"),
    ("MaskedByABuffer", "aten._softmax", "float32", "masked_row"),
    ("WrittenInPlace", "aten._softmax", "float32", "masked_row"),
    ("MaskTimesInf", "aten.mul", "float32", "zero_times_inf"),
    ("InfMinusInf", "aten.sub", "float32", "inf_minus_inf"),
    ("Reciprocal", "aten.reciprocal", "float32", "division_by_zero"),
    ("DivisionInPlace", "aten.div_", "float32", "division_by_zero"),
    ("Rsqrt", "aten.rsqrt", "float32", "division_by_zero"),
    ("MeanOfNothing", "aten.mean", "float32", "mean_of_nothing"),
    ("HugeResidual", "aten.add", "float32", "overflow"),
    ("EpsLostInFP16", "aten.div", "float16", "zero_over_zero"),
    ("SumInFP16", "aten.sum", "float16", "overflow"),
    ("SquareInFP16", "aten.pow", "float16", "overflow"),
    ("DroppedInFP16", "aten.mul", "float16", "overflow"),
    ("CheckpointedForward", "aten.log", "float32", "log_of_zero"),
    ("WrittenNaN", "aten.masked_fill", "float32", "written"),
    ("ConstantInf", "aten.lift_fresh", "float32", "written"),
]

BACKWARD = [
    ("RootBackward", "aten.div", "SqrtBackward0", "division_by_zero"),
    ("HandWrittenNormBackward", "aten.div", "SqrtBackward0", "division_by_zero"),
    ("PowBackward", "aten.pow", "PowBackward0", "zero_to_negative_power"),
    ("ArccosBackward", "aten.rsqrt", "AcosBackward0", "division_by_zero"),
    ("WhereBackward", "aten.div", "LogBackward0", "zero_over_zero"),
    ("UsersFunction", "aten.div", "DoublesBackward", "division_by_zero"),
    ("Checkpointed", "aten.div", "SqrtBackward0", "division_by_zero"),
    ("CheckpointedReentrant", "aten.div", "SqrtBackward0", "division_by_zero"),
    ("HarmlessThenReal", "aten.div", "SqrtBackward0", "division_by_zero"),
]

UNDER_AUTOCAST = [
    ("MatmulOverflow", FP16, "part.linear", "aten.mm", 270000.0),
    ("MatmulOverflowBF16", BF16, "part.linear", "aten.mm", 1.794e41),
    ("CastOverflow", FP16, "part.linear", "aten._to_copy", 70000.0),
    ("EmbeddingOverflow", FP16, "part.linear", "aten.addmm", 150000.0),
    ("Scores", FP16, "part", "aten.bmm", 120000.0),
    ("Convolution", FP16, "part.conv", "aten.convolution", 187500.0),
]


@pytest.mark.parametrize(("name", "op", "dtype", "why"), FORWARD, ids=[case[0] for case in FORWARD])
def test_forward(name, op, dtype, why):
    part = getattr(faulty, name)
    origin = find_origin(traced(part()))
    assert (origin.module, origin.op, origin.direction, origin.dtype) == ("part", op, "forward", dtype)
    assert (origin.source, origin.why, origin.node) == (line(part), why, "")
    assert origin.how in ("producer", "revealed", "written")
    assert not all(values.finite for values in origin.outputs)


@pytest.mark.slow(unless=lambda name, dtype: ([case[0] for case in BACKWARD].index(name) % 2 == 0) == (dtype is None))
@pytest.mark.parametrize(("name", "op", "node", "why"), BACKWARD, ids=[case[0] for case in BACKWARD])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_backward(name, op, node, why, dtype):
    part = getattr(faulty, name)
    trace = traced(part(), dtype)
    origin = find_origin(trace)
    assert (origin.module, origin.op, origin.direction, origin.dtype) == ("part", op, "backward", "float32")
    assert (origin.source, origin.why, origin.node) == (line(part), why, node)
    assert origin.how == "producer"


@pytest.mark.parametrize(("name", "dtype", "module", "op", "exact"), UNDER_AUTOCAST, ids=[c[0] for c in UNDER_AUTOCAST])
def test_overflow_under_autocast(name, dtype, module, op, exact):
    part = getattr(faulty, name)
    origin = find_origin(traced(part(), dtype))
    assert (origin.module, origin.op, origin.direction) == (module, op, "forward")
    assert (origin.dtype, origin.source, origin.why) == (str(dtype)[6:], line(part), "overflow")
    assert origin.should_have_been == pytest.approx(exact, rel=0.01)
    assert f"{origin.should_have_been / torch.finfo(dtype).max:.3g} times the largest" in origin.reason
    finite_in_fp32 = exact < torch.finfo(torch.float32).max
    assert math.isfinite(origin.in_fp32) == finite_in_fp32


def test_the_variance_of_a_batch_of_one():
    with pytest.warns(UserWarning, match="degrees of freedom"):
        origin = find_origin(traced(faulty.BatchOfOne()))
    assert (origin.module, origin.op, origin.why) == ("part", "aten.var", "variance_of_one")
    assert origin.source == line(faulty.BatchOfOne)


@pytest.mark.skipif(
    torch.__version__ < "2.15",
    reason="before PyTorch 2.15, an operation inside another warns when the outer one returns",
)
def test_recomputing_an_operation_gives_no_warning():
    with pytest.warns(UserWarning, match="degrees of freedom") as warned:
        traced(faulty.BatchOfOne())
    assert len(warned) <= 2  # forward and backward


def test_a_norm_without_eps():
    origin = find_origin(traced(faulty.LayerNormWithoutEps()))
    assert (origin.module, origin.op, origin.why) == ("part.norm", "aten.native_layer_norm", "zero_variance")
    assert origin.source == line(faulty.LayerNormWithoutEps)


def test_no_result_even_in_fp64_is_distinguished_from_an_overflow():
    unsafe, overflow = find_origin(traced(faulty.LogOfZero())), find_origin(traced(faulty.HugeResidual()))
    assert unsafe.should_have_been == math.inf
    assert overflow.should_have_been == pytest.approx(4.5e38)
    assert "1.32 times the largest fp32" in overflow.reason


def test_reasons_contain_the_numbers():
    assert find_origin(traced(faulty.LogOfZero())).reason == "log of 0 (12 of 12 values)"
    assert find_origin(traced(faulty.DivisionInPlace())).reason == "division by 0 (12 of 12 values)"
    row = find_origin(traced(faulty.MaskedRow())).reason
    assert row.startswith("every entry of a row is -Inf (1 of 4 rows): inf - inf; aten.masked_fill at")
    assert find_origin(traced(faulty.MaskedByABuffer())).reason.endswith("the Inf was there before the step began")
    assert find_origin(traced(faulty.RootBackward())).reason.endswith("in the backward of sqrt")


def fill(scores, mask):
    return scores.masked_fill(mask, -math.inf)


def fill_(scores, mask):
    return scores.clone().masked_fill_(mask, -math.inf)


def choose(scores, mask):
    return torch.where(mask, torch.full_like(scores, -math.inf), scores)


def add(scores, mask):
    return scores + torch.zeros(mask.shape).masked_fill(mask, -math.inf)


def write(scores, mask):
    scores = scores.clone()
    scores[mask] = -math.inf
    return scores


def put(scores, mask):
    scores = scores.clone()
    scores[mask] = torch.full((int(mask.sum()),), -math.inf)
    return scores


class Names(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def name_of_a_write() -> str:
    """What `write` runs last: `index_put_`, or `masked_fill_` from PyTorch 2.15 on."""
    scores = torch.zeros(2)
    with Names() as names:
        write(scores, scores > 0)
    return names.names[-1]


@pytest.mark.parametrize(
    ("how", "op"),
    [
        *[(fill, "masked_fill"), (fill_, "masked_fill_"), (choose, "where"), (add, "add")],
        *[(write, name_of_a_write()), (put, "index_put_")],
    ],
)
def test_of_several_masks_the_one_that_completes_a_row_is_named(how, op):
    causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 3, dtype=torch.bool)
    padding[:, 0] = True
    model = Around(nn.Identity())
    with Trace(model) as trace:
        queries = model(torch.randn(3, 3))
        scores = how(queries @ queries.T, causal)
        (how(scores, padding) * 2.0).softmax(-1).sum().backward()
    origin = find_origin(trace)
    assert origin.reason.startswith(f"every entry of a row is -Inf (1 of 3 rows): inf - inf; aten.{op} at {__file__}:")
    writes = [record.index for record in trace.records if record.op == f"aten.{op}" and record.direction == "forward"]
    assert trace.filled[origin.index] == writes[-1]
    assert len(writes) > 1


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def projection(values, mask):
    return (values * mask.float()).sum() / (mask.float() * mask.float()).sum()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (masked_mean, "mean_of_nothing"),
        (lambda values, mask: masked_mean(values, mask.float()), "mean_of_nothing"),
        (lambda values, mask: ((values * mask).sum(1, True) / mask.sum(1, True).float()).sum(), "mean_of_nothing"),
        (projection, "zero_over_zero"),
    ],
)
def test_a_mean_over_a_mask_of_nothing_is_told_from_any_other_0_over_0(loss, why):
    model = Around(nn.Identity())
    with Trace(model) as trace:
        loss(model(torch.randn(4, 3)), torch.zeros(4, 2, dtype=torch.bool)).backward()
    assert (find_origin(trace).op, find_origin(trace).why) == ("aten.div", why)


def test_the_loss_scale_overflows_in_backward():
    trace = traced(Work(lambda x: F.linear(x, torch.eye(3)), 1.0), FP16, scale=2.0**24)
    origin = find_origin(trace)
    assert (origin.module, origin.direction, origin.dtype) == ("objective", "backward", "float16")
    assert (origin.op, origin.why) == ("aten._to_copy", "overflow")  # the widening of the logits, backwards
    assert origin.should_have_been == origin.in_fp32 > 65504
    assert find_origin(traced(Work(lambda x: F.linear(x, torch.eye(3)), 1.0), FP16, scale=2.0**4)) is None


def test_every_target_ignored():
    model = Around(nn.Identity())
    with Trace(model) as trace:
        F.cross_entropy(model(torch.randn(4, 3)), torch.full((4,), -100)).backward()
    origin = find_origin(trace)
    assert (origin.module, origin.op, origin.why) == ("objective", "aten.nll_loss_forward", "mean_of_nothing")
    assert origin.source.startswith(__file__)


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets + 1, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [F.cross_entropy, smoothed], ids=["the wanted class", "label smoothing"])
@pytest.mark.parametrize("how", ["written", "given"])
def test_a_masked_class_makes_the_loss_infinite_and_the_loss_and_the_mask_are_named(loss, how):
    model, mask = Around(nn.Identity()), torch.tensor([-math.inf, 0.0])
    with Trace(model) as trace:
        logits = model(torch.randn(4, 3))
        logits = logits + mask if how == "given" else logits.masked_fill(mask < 0, -math.inf)
        loss(logits, torch.zeros(4, dtype=torch.int64)).backward()
    origin = find_origin(trace)
    assert (origin.module, origin.op, origin.how) == ("objective", "aten._log_softmax", how)
    assert origin.why == "masked_logits"
    assert "written as a constant by aten.masked_fill at" in origin.reason or how == "given"
    assert "before the step began" in origin.reason or how == "written"


class Statistics(nn.Module):
    """Returns its input, and keeps a mean in a buffer."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.full((3,), -math.inf))

    def forward(self, x):
        self.write(self, x.detach())
        return x + self.mask.clamp(min=0.0)


def assigned(module, x):
    module.mean = module.mean + x.mean(0) / 0.0


SPOILT = {
    "in place": (lambda module, x: module.mean.div_(0.0), "aten.div_", "zero_over_zero", "NaN"),
    "assigned": (assigned, "aten.div", "division_by_zero", "values up to inf"),
    "a constant": (lambda module, x: module.mean.fill_(math.inf), "aten.fill_", "buffer", "values up to inf"),
    "huge": (lambda module, x: module.mean.add_(1e30), "aten.add_", "buffer", "values up to 1e+30"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_buffer_that_is_spoilt_while_loss_and_gradients_are_finite(how):
    write, op, why, left = SPOILT[how]
    model = Around(Statistics(write))
    with Trace(model) as trace:
        model(torch.ones(4, 3, requires_grad=True)).sum().backward()
    origin = find_origin(trace)
    assert (origin.module, origin.op, origin.direction, origin.why) == ("part", op, "forward", why)
    assert origin.reason.endswith(f"it left {left} in the buffer part.mean")


def test_a_statistic_of_batchnorm_that_overflows_is_named():
    model = Around(nn.BatchNorm1d(3))
    with Trace(model) as trace:
        model(torch.randn(4, 3) * 1e16).sum().backward()
    origin = find_origin(trace)
    assert (origin.module, origin.why) == ("part", "buffer")
    assert "in the buffer part.running_var" in origin.reason


def test_a_mask_is_no_origin():
    model = Around(Statistics(lambda module, x: module.mask.copy_(torch.full((3,), -math.inf))))
    with Trace(model) as trace:
        model(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert find_origin(trace) is None


@pytest.mark.parametrize("where", ["data", "weights"])
def test_values_non_finite_before_the_step_are_attributed_to_their_first_reader(where):
    model, inputs = Around(nn.Linear(3, 3)), torch.randn(4, 3)
    with torch.no_grad():
        (inputs if where == "data" else model.part.weight)[0, 0] = math.nan
    with Trace(model) as trace:
        model(inputs).sum().backward()
    origin = find_origin(trace)
    assert (origin.how, origin.why) == ("given", "given")
    assert origin.module == ("stem" if where == "data" else "part")
    assert not trace.accidents


def test_unwritten_memory():
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    origin = find_origin(traced(Work(lambda x: x + torch.empty(3))))
    assert (origin.op, origin.how) == ("aten.empty", "unwritten")


HARMLESS = {
    "mask": lambda x: (x @ x.T).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf).softmax(-1) @ x,
    "triu": lambda x: (x @ x.T + torch.full((4, 4), -math.inf).triu(1)).softmax(-1) @ x,
    "where": lambda x: torch.where(torch.eye(4).bool(), x @ x.T, -math.inf).softmax(-1) @ x,
    "masked row, fixed": lambda x: x.clone().masked_fill_(x == 0, -math.inf).softmax(-1).nan_to_num(0.0),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
    "sdpa masked row": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], attn_mask=torch.arange(4)[:, None].expand(4, 4) > 0
    )[0, 0],
    "max pooling": lambda x: F.max_pool1d(x[None], 3, stride=1, padding=1)[0],
    "padding": lambda x: F.pad(x, (1, 0), value=-math.inf).softmax(-1)[:, 1:],
    "bound": lambda x: torch.minimum(x, torch.tensor(math.inf)).clamp(max=math.inf),
    "norm of order inf": lambda x: x + x.norm(p=math.inf),
    "norm at 0": lambda x: x + x.norm(),
    "std at 0": lambda x: x + x.std(),
    "normalize at 0": lambda x: F.normalize(x),
    "atan2 at 0": lambda x: torch.atan2(x, x),
    "double where": lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0),
    "log for a metric": lambda x: x + (x.detach().log() > 0),
    "isfinite": lambda x: x + torch.isfinite(x.detach() / 0),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "empty, then written": lambda x: torch.empty(4, 3).copy_(x),
}


ON_PURPOSE = ["mask", "triu", "where", "sdpa", "sdpa masked row", "max pooling", "padding", "bound"]
"""Those in which constants are written: these are not even accidents."""


@pytest.mark.slow(unless=lambda name, dtype: (name in ON_PURPOSE) == (dtype is None))
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_harmless_non_finite_values_are_not_blamed(name, dtype):
    trace = traced(Work(HARMLESS[name]), dtype)
    assert find_origin(trace) is None
    assert not (name in ON_PURPOSE and dtype is None and trace.accidents)


def test_a_real_overflow_beside_a_mask_is_blamed():
    def work(x):
        scores = torch.full((4, 4), -math.inf).triu(1) + (x @ x.T)
        return scores.softmax(-1) @ x

    origin = find_origin(traced(Work(work, 3e19)))
    assert (origin.op, origin.why) == ("aten.mm", "overflow")


MEMORY = {
    "cast into memory full of NaN": (
        lambda x: torch.full((4, 3), math.nan, dtype=FP16).copy_(x + 7e4).float(),
        ("aten.copy_", "overflow"),
    ),
    "overwritten as a whole": (lambda x: written(x.log().zero_(), math.nan), ("aten.fill_", "written")),
    "overwritten in part": (lambda x: written(x.log(), 1.0), ("aten.log", "log_of_zero")),
    "written after an accident": (lambda x: written(log_of(x * 1, 1), math.nan), ("aten.log_", "log_of_zero")),
}


def written(x, value):
    """Writes the first row in place with one operation; `x[0] = value` takes two in some versions."""
    x[0].fill_(value)
    return x


def log_of(x, row):
    """Replaces one row of a tensor by its log, in place."""
    x[row].log_()
    return x


@pytest.mark.parametrize("name", MEMORY)
def test_values_are_followed_through_memory_that_is_written_twice(name):
    work, expected = MEMORY[name]
    origin = find_origin(traced(Work(work)))
    assert (origin.op, origin.why) == expected


def test_freed_memory_leaves_no_sources_behind():
    with Trace(nn.Identity()) as trace:
        for _ in range(50):
            torch.zeros(3).log()  # gone at once, and its place is taken by what follows
            torch.tensor([1.0, math.nan, 1.0]) + 1
    sums = [record for record in trace.records if record.op == "aten.add"]
    assert [[source.how for source in record.sources] for record in sums] == [["written"]] * 50


def test_only_the_result_of_attention_counts_not_its_logsumexp():
    finite, infinite = Values((4,), "float32", 1.0), Values((4,), "float32", math.inf)
    call = Call(None, "aten._scaled_dot_product_efficient_attention", True, (), {})
    assert source_kind(call, 0, [finite], infinite, frozenset()) == "producer"
    assert source_kind(call, 1, [finite], infinite, frozenset()) == "written"


class Deep(nn.Module):
    """Eight blocks, each of which scales its input by 30."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Identity()) for _ in range(8))
        for block in self.blocks:
            nn.init.constant_(block[0].weight, 10.0)
        self.head = nn.Linear(3, 1)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def test_the_chain_shows_the_growth_block_by_block():
    model = Deep()
    with Trace(model) as trace:
        with torch.autocast("cpu", FP16):
            out = model(torch.ones(2, 3))
        out.float().sum().backward()
    origin = find_origin(trace)
    assert (origin.module, origin.op) == ("blocks.3.0", "aten.mm")
    assert [link.module for link in origin.chain] == [f"blocks.{i}" for i in range(4)]
    assert [link.absmax for link in origin.chain[:3]] == pytest.approx([30.0, 900.0, 27000.0], rel=1e-3)
    assert (origin.chain[3].absmax, origin.chain[3].dtype) == (math.inf, "float16")


def test_the_chain_of_gradients_follows_the_outputs():
    model = Deep()
    with Trace(model) as trace:
        with torch.autocast("cpu", FP16):
            out = model(torch.zeros(2, 3))
        (out.float().sum() * 4096).backward()
    origin = find_origin(trace)
    assert origin.direction == "backward"
    gradients = [link for link in origin.chain if link.direction == "backward"]
    assert [link.module for link in origin.chain[:8]] == [f"blocks.{i}" for i in range(8)]
    assert gradients[0].module == "objective"
    assert gradients[1].module == "head"
    assert gradients[-1].module == origin.module.removesuffix(".0")
    assert [link.absmax for link in gradients][:2] < [link.absmax for link in gradients][-2:]


def test_a_trace_without_a_backward_pass_ends_in_its_last_output():
    model = Around(faulty.LogOfZero())
    with torch.no_grad(), Trace(model) as trace:
        model(torch.ones(4, 3))
    assert find_origin(trace).op == "aten.log"


def test_gradients_from_autograd_grad_are_seen_too():
    model = Around(faulty.RootBackward())
    with Trace(model) as trace:
        torch.autograd.grad(model(torch.ones(4, 3)).sum(), list(model.stem.parameters()))
    assert find_origin(trace).source == line(faulty.RootBackward)


def test_the_micro_batch_that_failed_first_is_named():
    model = Around(Work(torch.log, 1.0))
    with Trace(model) as trace:
        for number in range(3):
            model.part.value = float(number != 1)
            model(torch.ones(4, 3)).sum().backward()
    origin = find_origin(trace)
    assert origin.op == "aten.log"
    assert trace.records[origin.index].part == 1


def test_the_fault_in_the_first_micro_batch_is_named_before_a_later_one():
    model = Around(nn.Identity())
    with Trace(model) as trace:
        for work in (lambda x: x.masked_fill(x == 0, math.nan), torch.log):
            model.part = Work(work)
            model(torch.ones(4, 3)).sum().backward()
    assert find_origin(trace).op == "aten.masked_fill"


def test_an_origin_can_be_written_as_json():
    found = find_origin(traced(faulty.MatmulOverflow(), FP16)).as_dict()
    assert found["inputs"][0] == {"shape": [4, 3], "dtype": "float16", "absmax": 300.0, "finite": True}
    assert found["outputs"] == [{"shape": [4, 3], "dtype": "float16", "absmax": math.inf, "finite": False}]
    assert found["chain"][-1]["module"] == "part"
