"""What a script trains is guarded as it is: the same bits until something happens, and then as if it had not."""

import copy
import gc
import json
import math
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stabletrain
from stabletrain.beside.script.start import start, stop
from stabletrain.guard.guard import Guard
from stabletrain.guard.loop_guard import guard_of
from tests.beside.script.given import KINDS, Adversarial, Plain, TwoNetworks, train
from tests.guard.given import CLASSES, batches, bits, network, same


@pytest.fixture
def begin(tmp_path):
    def begin(**options):
        start(**{"folder": str(tmp_path / "incidents"), "max_incidents": 0, **options})

    yield begin
    stop()


ALONE = {name: kind for name, kind in KINDS.items() if kind is not Adversarial}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_healthy_script_trains_to_the_same_bits_and_nothing_is_said(kind, begin, capsys):
    begin()
    found, loop = train(kind)
    guards = [guard_of(part) for part in loop.parts if isinstance(part, torch.optim.Optimizer)]
    assert [guard.last.step for guard in guards] == [9] * len(guards)
    reasons = [guard._loop.policy.update_check.why(guard._loop.optimizer) for guard in guards]
    assert not any("replaced" in reason for reason in reasons), "the watch itself costs no copies"
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl, "calls are watched until each optimizer has stepped"
    stop()
    assert same(found, train(kind)[0])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ALONE.values(), ids=ALONE)
def test_a_bad_batch_leaves_everything_as_if_its_step_had_not_been(kind, begin):
    begin()
    found, loop = train(kind, bad=(1, 7))
    assert guard_of(loop.optimizer).skips["nonfinite"] == 2
    stop()
    assert same(found, train(kind, held=(1, 7))[0])


def test_of_networks_that_train_together_each_stays_finite(begin, capsys):
    begin()
    found, loop = train(Adversarial, bad=(1, 7))
    assert all(value.isfinite().all() for value in found.values() if isinstance(value, torch.Tensor))
    assert [guard_of(part).skips["nonfinite"] for part in loop.parts[2:]] == [0, 2, 0]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "stabletrain: Sequential: step 1: loss is nan; update skipped (nonfinite, number 1)"


def test_an_incident_names_the_module_among_several_the_operation_and_the_line(begin, tmp_path):
    class Logs(TwoNetworks):
        def __init__(self):
            super().__init__()
            self.encoder.append(Log())

    begin(max_incidents=10)
    train(Logs, steps=2)
    record = json.loads((tmp_path / "incidents" / "step-00000001" / "diagnosis.json").read_text())
    assert record["origin"]["op"] == "aten.log"
    assert record["origin"]["module"] == "Sequential.3"
    assert "test_watch.py" in record["origin"]["source"]


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - 1)


def test_an_update_that_is_not_finite_is_undone(begin):
    class Sloppy(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.spoils = False

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter -= mean * (math.nan if self.spoils else 0.1)

    begin()
    model = network()
    optimizer = Sloppy(model.parameters())
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.spoils = number == 2
        before = bits(optimizer) | {name: value.clone() for name, value in model.named_parameters()}
        optimizer.step()
        after = bits(optimizer) | {name: value.clone() for name, value in model.named_parameters()}
        assert same(before, after) is optimizer.spoils
    assert guard_of(optimizer).skips["update"] == 1


class Twice(torch.optim.Optimizer):
    """Needs a closure, and runs it twice, each time with other weights."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad
        return loss


class RunsClosures(Plain):
    def __init__(self):
        super().__init__()
        self.optimizer = Twice(self.model.parameters())
        self.parts = [self.model, self.optimizer]

    step = KINDS["Closure"].step


def test_an_optimizer_that_runs_its_closure_is_named_and_keeps_its_weights_finite(begin, capsys):
    begin()
    found, _ = train(RunsClosures)
    said = capsys.readouterr().err
    assert said == (
        "stabletrain: Twice of 8 tensors ([16, 4], [16] ...): steps are not judged, only undone if not finite: "
        "its step runs the closure itself\n"
    )
    bad, _ = train(RunsClosures, bad=(1, 7))
    stop()
    assert same(found, train(RunsClosures)[0])
    weights = [value for name, value in bad.items() if isinstance(value, torch.Tensor)]
    assert all(value.isfinite().all() for value in weights)
    assert "step 7: the update was not finite, and was undone" in capsys.readouterr().err


class Compiled(Plain):
    """The model is compiled after the optimizer was made."""

    def __init__(self):
        super().__init__()
        self.run = torch.compile(self.model, backend="aot_eager")

    def loss(self, x, y):
        return F.cross_entropy(self.run(x), y)


def test_a_model_that_is_compiled_after_the_optimizer_was_made_is_guarded_and_compiled_once(begin):
    begin()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, loop = train(Compiled, bad=(1, 7))
    assert guard_of(loop.optimizer).skips["nonfinite"] == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    stop()
    assert same(found, train(Compiled, held=(1, 7))[0])


def test_a_guard_of_the_script_is_left_alone(begin):
    begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for batch in batches(2):
        guard.step(lambda x, y: F.cross_entropy(model(x), y), batch=batch)
    assert guard_of(optimizer) is guard


def test_a_guard_that_the_script_makes_later_takes_over(begin, tmp_path):
    begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    first, second = guard_of(optimizer), Guard.attach(model, optimizer, folder=tmp_path)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert (first.last.step, second.last.step) == (1, 1)


def test_a_copy_of_model_and_optimizer_gets_a_guard_of_its_own(begin):
    begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    twin, of_twin = copy.deepcopy((model, optimizer))
    before = bits(model)
    F.cross_entropy(twin(x), y).backward()
    of_twin.step()
    assert guard_of(of_twin) not in (None, guard_of(optimizer))
    assert same(before, bits(model))


class Grows(Plain):
    """The optimizer gets a second network's parameters after two steps."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.head = nn.Linear(CLASSES, CLASSES)
        self.parts, self.steps = [self.model, self.optimizer, self.head], 0

    def loss(self, x, y):
        self.steps += 1
        if self.steps == 3:
            self.optimizer.add_param_group({"params": self.head.parameters()})
        return F.cross_entropy(self.head(self.model(x)), y)


def test_parameters_of_another_network_that_are_added_later_are_guarded_from_the_next_step_on(begin):
    begin()
    found, loop = train(Grows, bad=(6,))
    guard = guard_of(loop.optimizer)
    assert guard.skips["nonfinite"] == 1
    assert len(guard._loop.parameters) == 10
    stop()
    assert same(found, train(Grows, held=(6,))[0])


def test_an_optimizer_whose_parameters_are_frozen_at_first_is_guarded_when_they_train(begin, capsys):
    begin()
    model = network()
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    model(x)
    optimizer.step()
    model.requires_grad_(True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert guard_of(optimizer).last.applied
    assert capsys.readouterr().err == ""


def test_a_schedule_made_late_warns_as_without_the_guard(begin):
    begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="Detected call of `lr_scheduler.step"):
        schedule.step()


def test_a_notebook_guards_what_later_cells_make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = object()  # IPython's extensions are called with it
    stabletrain.load_ipython_extension(shell)
    loop = train(Plain, bad=(3,))[1]
    assert guard_of(loop.optimizer).skips["nonfinite"] == 1
    assert (tmp_path / "incidents" / "step-00000003").is_dir()
    stabletrain.unload_ipython_extension(shell)
    assert guard_of(train(Plain)[1].optimizer) is None


def test_a_step_that_the_script_has_taken_before_is_guarded_too(begin):
    begin()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = optimizer.step
    for number, (x, y) in enumerate(batches(6)):
        x[0, 0] = math.nan if number in (0, 3) else 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step()
    assert guard_of(optimizer).last.step == 6
    assert guard_of(optimizer).skips["nonfinite"] == 2
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_what_a_script_drops_is_freed(begin):
    begin()
    loop = Plain()
    for x, y in batches(3):
        loop.step(x, y)
    model, optimizer = ref(loop.model), ref(loop.optimizer)
    del loop
    gc.collect()
    assert (model(), optimizer()) == (None, None)


def test_a_step_that_the_script_compiles_is_judged_outside_of_the_compiler(begin):
    begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for number, (x, y) in enumerate(batches(6)):
        x[0, 0] = math.nan if number in (0, 3) else 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        update()
    assert guard_of(optimizer).skips["nonfinite"] == 2
    assert all(value.isfinite().all() for value in model.state_dict().values())
