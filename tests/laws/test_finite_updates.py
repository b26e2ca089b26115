"""Law 11: an update is finite, or it did not happen.

After any step of any optimizer, weights, moments and buffers are finite, or have the bits that they had before. Each
optimizer here makes NaN or Inf of finite gradients, in a way of its own; each public door holds the law.
"""

import json
import math

import pytest
import torch
from torch import nn

from stabletrain import Guard
from stabletrain.errors import TrainingHalted
from stabletrain.stability.optimizers.closed import why_unproven
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.fragile import FRAGILE, RootFirst
from tests.runs import TINY_GPT, TINY_RESNET, composed


class Net(nn.Module):
    """A model some of whose gradients are exactly zero."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        dtype, norm = self.first.weight.dtype, self.norm
        hidden = nn.functional.batch_norm(
            self.first(x.to(dtype)).float(),
            norm.running_mean,
            norm.running_var,
            norm.weight.float(),
            norm.bias.float(),
            training=True,
        )
        return self.last(hidden.relu().to(dtype)).float()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(count)]


def bits(model, optimizer):
    """All bits of weights, buffers and the optimizer's state, and the state's keys."""
    inner = getattr(optimizer, "inner", optimizer)
    state = {
        (number, key): value.to(torch.double, copy=True) if isinstance(value, torch.Tensor) else value
        for number, each in enumerate(model.parameters())
        for key, value in inner.state.get(each, {}).items()
    }
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **state}


def unchanged_or_finite(before, after):
    return same(before, after) or all(
        bool(torch.isfinite(each).all()) for each in after.values() if isinstance(each, torch.Tensor)
    )


def same(before, after):
    def equal(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return before.keys() == after.keys() and all(equal(before[key], after[key]) for key in before)


def step_of(guard, model, optimizer, x, y):
    guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), batch=(x, y))


def two_parts(guard, model, optimizer, x, y):
    for part in (slice(0, 4), slice(4, 8)):
        guard.backward(lambda x, y: nn.functional.cross_entropy(model(x), y) / 2, batch=(x[part], y[part]))
    guard.update()


def attached(guard, model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def scaled(guard, model, optimizer, x, y):
    scaler = guard.scaler
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()


DOORS = {"step": step_of, "update": two_parts, "attach": attached, "attach with a scaler": scaled}


def guarded(door, model, optimizer, folder, **options):
    """A guard of a loop that goes through this door."""
    options = {"folder": folder, **options}
    if door.startswith("attach"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if door.endswith("scaler") else None
        guard = Guard.attach(model, optimizer, scaler=scaler, **options)
        guard.scaler = scaler
        return guard
    return Guard(model, optimizer, **options)


DOORS_OF = {
    name: [door for j, door in enumerate(DOORS) if (i + j) % 2 == 0 and (name, j) != ("fp16 weights", 3)]
    for i, name in enumerate(FRAGILE)
}
"""For every optimizer a door of `Guard` and one of `Guard.attach`; a `GradScaler` refuses gradients in fp16 itself."""

LOOPS = [(name, door) for name, doors in DOORS_OF.items() for door in doors]
FAST = {name: doors[i // 2 % len(doors)] for i, (name, doors) in enumerate(DOORS_OF.items())}


@pytest.mark.slow(unless=lambda name, door: FAST[name] == door)
@pytest.mark.parametrize(("name", "door"), LOOPS)
def test_an_own_loop(tmp_path, name, door):
    torch.manual_seed(0)
    model = Net()
    optimizer = FRAGILE[name](model.parameters())
    guard = guarded(door, model, optimizer, tmp_path, max_incidents=0)
    failed = 0
    for x, y in batches(6):
        before = bits(model, optimizer)
        halted = ""
        try:
            DOORS[door](guard, model, optimizer, x, y)
        except TrainingHalted as halt:
            halted = str(halt)
        after = bits(model, optimizer)
        assert unchanged_or_finite(before, after)
        if not guard.last.applied:
            failed += 1
            assert guard.last.bad_update
            assert same(before, after)
        if halted:
            break
    assert not halted or "in 3 steps in a row" in halted
    assert failed, "the optimizer was to fail"
    assert guard.skips["update"] == guard.skipped >= failed


@pytest.mark.parametrize("door", DOORS)
def test_without_the_check_the_weights_are_ruined(tmp_path, door):
    torch.manual_seed(0)
    model = Net()
    optimizer = RootFirst(model.parameters())
    guard = guarded(door, model, optimizer, tmp_path, max_incidents=0, check_update=False)
    before = bits(model, optimizer)
    DOORS[door](guard, model, optimizer, *batches(1)[0])
    assert not unchanged_or_finite(before, bits(model, optimizer))


def test_several_guarded_optimizers_are_undone_one_by_one(tmp_path):
    torch.manual_seed(0)
    models = [Net(), Net()]
    optimizers = [torch.optim.AdamW(models[0].parameters(), fused=True), RootFirst(models[1].parameters())]
    pairs = zip(models, optimizers, strict=True)
    guards = [Guard(model, each, folder=tmp_path, max_incidents=0) for model, each in pairs]
    for model, guard in zip(models, guards, strict=True):
        step_of(guard, model, None, *batches(1)[0])
    assert [guard.last.applied for guard in guards] == [True, False]


def test_an_update_that_is_bad_once_costs_nothing(tmp_path):
    """The same update, computed again, is finite: the machine was at fault, so it is applied."""

    def run(spoilt):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        calls = []

        def spoil(*_):
            calls.append(1)
            if len(calls) == spoilt:
                with torch.no_grad():
                    model.first.weight[0, 0] = math.nan

        optimizer.register_step_post_hook(spoil)
        guard = Guard(model, optimizer, folder=tmp_path / str(spoilt))
        for x, y in batches(5):
            step_of(guard, model, optimizer, x, y)
        return bits(model, optimizer), guard

    clean, _ = run(0)
    found, guard = run(3)
    assert same(clean, found)
    assert (guard.skipped, guard.machine_faults) == (0, 1)
    assert [incident.cause for incident in guard.incidents] == ["hardware_fault"]


def spoilt_once(calls, spoilt):
    """RMSprop that draws noise, and whose update is bad in one call, but not when it is computed again."""

    class Spoilt(torch.optim.RMSprop):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            weight = self.param_groups[0]["params"][0]
            weight.add_(torch.randn_like(weight), alpha=1e-3)
            calls.append(1)
            if len(calls) == spoilt:
                weight[0, 0] = math.nan

    return Spoilt


@pytest.mark.slow(unless=lambda door, incidents: (incidents == 4) == door.startswith("step"))
@pytest.mark.parametrize("incidents", [0, 4])
@pytest.mark.parametrize("door", ["step", "step with a scaler", "update", "attach", "attach with a scaler"])
def test_an_update_that_is_bad_once_is_applied_with_the_same_gradients_and_random_numbers(tmp_path, door, incidents):
    def run(spoilt):
        torch.manual_seed(0)
        model = Net()
        optimizer = spoilt_once([], spoilt)(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if "scaler" in door else None
        options = {"folder": tmp_path / str(spoilt), "scaler": scaler, "max_incidents": incidents}
        guard = (Guard.attach if "attach" in door else Guard)(model, optimizer, **options)
        if "attach" in door:
            guard.scaler = scaler
        for x, y in batches(5):
            DOORS[door.removesuffix(" with a scaler") if "step" in door else door](guard, model, optimizer, x, y)
        return bits(model, optimizer), guard, scaler and scaler.state_dict()

    clean, _, scale = run(0)
    found, guard, after = run(3)
    assert same(clean, found)
    assert after == scale
    assert (guard.skipped, guard.machine_faults) == (0, 1)


class Raising(torch.optim.RMSprop):
    """Raises half-way through its update."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].fill_(math.inf)
        raise FloatingPointError("half-way")


@pytest.mark.parametrize("door", ["step", "attach"])
def test_an_update_that_raises_half_way_leaves_nothing(tmp_path, door):
    model = Net()
    optimizer = Raising(model.parameters())
    guard = guarded(door, model, optimizer, tmp_path)
    before = bits(model, optimizer)
    with pytest.raises(FloatingPointError):
        DOORS[door](guard, model, optimizer, *batches(1)[0])
    after = bits(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in dict(model.named_parameters()))
    assert not optimizer.state


def test_what_a_hook_writes_is_judged_and_undone(tmp_path):
    """An average of the weights in a frozen parameter, or in a buffer, that becomes infinite."""
    model = Net()
    model.register_buffer("average", torch.ones(2))
    model.target = nn.Parameter(torch.ones(2), requires_grad=False)
    for written in (model.average, model.target):
        optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
        guard = Guard(model, optimizer, folder=tmp_path, max_incidents=0)
        # Its square is finite before the second step, so that only this step's own value closes the gate.
        factors = [1e15]
        optimizer.register_step_post_hook(lambda *_, w=written, f=factors: w.data.mul_(f[0]))
        for number, (x, y) in enumerate(batches(3)):
            before = bits(model, optimizer)
            step_of(guard, model, optimizer, x, y)
            assert unchanged_or_finite(before, bits(model, optimizer))
            assert guard.last.applied == (number == 0)
            assert guard.last.bad_update == (number > 0)
            factors[0] = 1e30


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a deque of its own", "gradient / gradient.norm()"),
        ("a module of its own", "gradient.norm() / gradient.norm()"),
        ("a number of its own", "'scale' of first.weight is nan after the step: a number that is computed in Python"),
        ("a moment in 8 bits", "aten._to_copy for first.weight (update, float8_e5m2)"),
        ("a hook", "aten.mul_ for average"),
        ("a hook on a complex buffer", "aten.mul_ for average"),
    ],
)
def test_what_is_outside_of_the_optimizers_state_is_named(tmp_path, name, told):
    torch.manual_seed(0)
    model = Net()
    model.register_buffer("average", torch.full((2,), 1e10))
    optimizer = FRAGILE.get(name, torch.optim.AdamW)(model.parameters())
    if "complex" in name:
        model.average = model.average.to(torch.complex64)
    if "hook" in name:
        optimizer.register_step_post_hook(lambda *_: model.average.mul_(1e30))
    guard = Guard(model, optimizer, folder=tmp_path)
    step_of(guard, model, optimizer, *batches(1)[0])
    (incident,) = guard.incidents
    assert incident.cause == "unsafe_optimizer"
    assert told in incident.verdict


def test_infinities_that_were_there_before_are_no_bad_update(tmp_path):
    """A mask among the frozen parameters, a best loss so far, and a moment whose square overflows."""

    class Healthy(torch.optim.RMSprop):
        def __init__(self, params):
            super().__init__(params, lr=0.01)
            self.best, self.sentinel = torch.tensor(math.inf), torch.full((64,), 1e30)

    model = Net()
    model.mask = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    optimizer = Healthy(model.parameters())
    guard = Guard(model, optimizer, folder=tmp_path)
    for x, y in batches(4):
        step_of(guard, model, optimizer, x, y)
    assert (guard.skipped, guard.machine_faults, guard.incidents) == (0, 0, [])
    with torch.no_grad():
        optimizer.register_step_post_hook(lambda *_: optimizer.best.fill_(math.nan))
    step_of(guard, model, optimizer, *batches(1)[0])
    assert not guard.last.applied


@pytest.mark.parametrize("change", ["dtype", "replaced", "huge"])
def test_what_a_proof_assumes_of_the_weights_is_looked_at(tmp_path, change):
    model = Net()
    if change == "huge":
        model.last.bias.data[0] = 1e20
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard(model, optimizer, folder=tmp_path, max_incidents=0)
    x, y = batches(1)[0]
    step_of(guard, model, optimizer, x, y)
    assert bool(why_unproven(optimizer)) == (change == "huge")
    if change == "dtype":
        model.norm.weight.data = model.norm.weight.data.half()
        assert "float16" in why_unproven(optimizer)
    if change == "replaced":  # the guard looks at the new parameter's gradient
        model.last = nn.Linear(6, 3)
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        model.last.weight.register_hook(lambda gradient: gradient * math.nan)
        before = bits(model, optimizer)
        step_of(guard, model, optimizer, x, y)
        assert not guard.last.applied
        assert unchanged_or_finite(before, bits(model, optimizer))


def test_a_step_without_any_gradient_is_checked_too(tmp_path):
    class Always(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                weight.div_(sum(0 if each.grad is None else 1 for each in self.param_groups[0]["params"]))

    model = Net()
    optimizer = Always(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path, max_incidents=0)
    before = bits(model, optimizer)
    optimizer.step()
    assert same(before, bits(model, optimizer))
    assert guard.last.bad_update


MODELS = {"gpt": TINY_GPT, "resnet": TINY_RESNET}
RUN = ("steps=6", "eval_every=6", "report=false", "wandb=disabled", "monitors=none", "checkpoint=off")


def trained(folder, model, make, *overrides, forensics=False):
    """Trains a run with an optimizer of the user's own; returns it, and what ended it."""
    more = () if forensics else ("forensics=off",)
    with composed(*MODELS[model], *RUN, *more, *overrides) as cfg:
        job = build(cfg, folder)
    optimizer = make(job.state.model.parameters())
    job.state.optimizer, job.saved.state.optimizer = optimizer, optimizer
    try:
        train(job)
    except TrainingHalted as halt:
        return job, str(halt)
    return job, ""


@pytest.mark.slow(
    unless=lambda name, guard: (name, guard) in (("rsqrt before eps", "skip"), ("moment only", "rollback"))
)
@pytest.mark.parametrize(
    ("name", "model", "guard"),
    [
        ("rsqrt before eps", "gpt", "skip"),
        ("rsqrt before eps", "resnet", "rollback"),
        ("moment only", "gpt", "skip"),
        ("moment only", "resnet", "rollback"),
        ("fused adamw without eps", "gpt", "rollback"),
        ("fused adamw without eps", "resnet", "skip"),
    ],
)
def test_the_trainer(tmp_path, name, model, guard):
    precision = "precision=fp32"
    job, halt = trained(tmp_path, model, FRAGILE[name], f"guard={guard}", "init=zero_residual", precision)
    assert "in 3 steps in a row" in halt
    with composed(*MODELS[model], *RUN, "init=zero_residual", precision) as cfg:
        clean = build(cfg, tmp_path / "clean")
    assert same(bits(clean.state.model, clean.state.optimizer), bits(job.state.model, job.state.optimizer))
    assert job.tools.guard.skips["update"] == 3


def test_the_trainer_names_the_operation_and_neither_the_rate_nor_the_memory(tmp_path):
    _, halt = trained(tmp_path, "gpt", RootFirst, "init=zero_residual", forensics=True)
    (path,) = (tmp_path / "incidents").glob("*/diagnosis.json")
    found = json.loads(path.read_text())
    assert (found["kind"], found["cause"]) == ("update", "unsafe_optimizer")
    assert "rsqrt" in found["origin"]["op"]
    assert "fragile.py" in found["origin"]["source"]
    assert not any(fix.startswith("optimizer.lr") for fix in found["fix"])
    assert found["fix"][0] in halt


@pytest.mark.beside
@pytest.mark.slow(unless=lambda guard: guard == "rollback")
@pytest.mark.parametrize("guard", ["rollback", "skip"])
def test_one_bad_update_leaves_a_run_as_one_without_it(tmp_path, guard):
    def run(name, *overrides):
        options = ("steps=6", f"guard={guard}", "optimizer=adamw")
        with composed(*TINY_GPT, *RUN, *options, *overrides) as cfg:
            job = build(cfg, tmp_path / name)
        train(job)
        return job

    clean, spoilt = run("clean"), run("run", "faults=optimizer", "faults.at=[3]")
    a, b = (bits(each.state.model, each.state.optimizer) for each in (clean, spoilt))
    assert same(a, b)
    assert spoilt.tools.guard.machine_faults == 1
    assert sum(spoilt.tools.guard.skips.values()) == 0
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert "restore" in [event["event"] for event in events]
    assert [event["cause"] for event in events if event["event"] == "incident"] == ["hardware_fault"]
