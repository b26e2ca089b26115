"""Optimizers that run a closure in their step: LBFGS, and two-step methods. A step happens whole, or not at all."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard
from tests.guard.given import batches, network

SEARCHES = [None, "strong_wolfe"]


class Ascends(torch.optim.Optimizer):
    """SAM (arXiv 2010.01412): takes the gradient at a point up the slope."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    def move_up(self):
        group = self.param_groups[0]
        for parameter in group["params"]:
            self.state[parameter]["start"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=group["rho"])

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.move_up()
        with torch.enable_grad():
            closure()
        self.descend()
        return loss

    def descend(self):
        group = self.param_groups[0]
        for parameter in group["params"]:
            parameter.copy_(self.state[parameter]["start"]).add_(parameter.grad, alpha=-group["lr"])


class MovesFirst(Ascends):
    """The same for a loop that calls backward before the step: its closure is only the second evaluation."""

    @torch.no_grad()
    def step(self, closure):
        self.move_up()
        with torch.enable_grad():
            closure()
        self.descend()


def lbfgs(search, **settings):
    """Returns what makes an LBFGS with a short history."""
    given = {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": search} | settings
    return lambda parameters: torch.optim.LBFGS(parameters, **given)


class Counted(nn.Module):
    """A network that counts its forward passes in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Loop:
    """A model with an optimizer whose step takes a closure; its guard gets the loss, or is attached."""

    def __init__(self, folder, make, attach=False, **options):
        self.model, self.attached, self.set_to_none = Counted(), attach, True
        self.optimizer = make(self.model.parameters())
        if folder is not None:
            made = Guard.attach if attach else Guard
            self.guard = made(self.model, self.optimizer, folder=folder, **options)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def closure(self, x, y):
        """The closure of a loop without `guard.step`."""

        def closure():
            self.optimizer.zero_grad(self.set_to_none)
            loss = self.loss(x, y)
            loss.backward()
            return loss

        return closure

    def run(self, data, first=True, plainly=False):
        if first:
            torch.manual_seed(2)
        if plainly or self.attached:
            return [self.optimizer.step(self.closure(*batch)).item() for batch in data]
        return [float(self.guard.step(self.loss, batch)) for batch in data]

    def everything(self):
        """Copies of weights, buffers, the optimizer's state, gradients and random numbers."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        found = self.model.state_dict(), self.optimizer.state_dict(), gradients, torch.get_rng_state()
        return copy.deepcopy(found)


def equal(a, b):
    """Whether two values have the same bits, in tensors, lists and dicts."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def with_nan(data, at):
    """The data with a NaN in one batch."""
    data = [(x.clone(), y) for x, y in data]
    data[at][0][3, 1] = math.nan
    return data


@pytest.mark.slow(unless=lambda make, attach: (make is Ascends) != attach)
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("make", [lbfgs(None), lbfgs("strong_wolfe"), Ascends], ids=["plain", "wolfe", "sam"])
def test_healthy_steps_have_the_bits_of_the_loop_without_a_guard(tmp_path, make, attach):
    data, plain = batches(20), Loop(None, make)
    wanted = plain.run(data, plainly=True)
    options = {"rollback": True, "checksum_every": 1} | ({} if attach else {"recheck_every": 3})
    guarded = Loop(tmp_path, make, attach, **options)
    assert guarded.run(data) == wanted
    assert equal(guarded.everything(), plain.everything())
    assert guarded.model.calls == plain.model.calls, "no evaluation is computed twice"
    assert not guarded.guard.skipped


def test_a_closure_after_a_first_move_is_computed(tmp_path):
    data, plain, guarded = batches(6), Loop(None, MovesFirst), Loop(tmp_path, MovesFirst)
    torch.manual_seed(2)
    for batch in data:
        plain.closure(*batch)()
        plain.optimizer.step(plain.closure(*batch))
    guarded.run(data)
    assert equal(guarded.everything(), plain.everything())


@pytest.mark.parametrize("search", SEARCHES)
def test_micro_batches_add_up_in_every_evaluation(tmp_path, search):
    data, plain, guarded = batches(8), Loop(None, lbfgs(search)), Loop(tmp_path, lbfgs(search))
    torch.manual_seed(2)
    for first, second in zip(data[::2], data[1::2], strict=True):

        def closure(first=first, second=second):
            plain.optimizer.zero_grad()
            losses = [plain.loss(*each) / 2 for each in (first, second)]
            for loss in losses:
                loss.backward()
            return sum(losses)

        plain.optimizer.step(closure)
    torch.manual_seed(2)
    for first, second in zip(data[::2], data[1::2], strict=True):
        for each in (first, second):
            guarded.guard.backward(lambda x, y: guarded.loss(x, y) / 2, each)
        guarded.guard.update()
    assert equal(guarded.everything()[:2], plain.everything()[:2])


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("make", [lbfgs(None), lbfgs("strong_wolfe"), Ascends], ids=["plain", "wolfe", "sam"])
def test_a_bad_batch_changes_nothing(tmp_path, make, attach):
    loop = Loop(tmp_path, make, attach)
    loop.set_to_none = False
    loop.run(batches(3))
    before, calls = loop.everything()[:2], loop.model.calls
    loop.run(with_nan(batches(1), 0))
    assert equal(before, loop.everything()[:2])
    assert loop.model.calls == calls + 1, "one evaluation decides"
    assert loop.guard.skips["nonfinite"] == 1
    assert loop.guard.incidents[0].cause == "poison_input"
    loop.run(batches(1))
    assert loop.guard.last.applied


class Barrier(nn.Module):
    """Its loss is the logarithm of a weight that a long step makes negative; BatchNorm and a counter run along."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm, self.calls = nn.Parameter(torch.tensor([1.0, 2.0])), nn.BatchNorm1d(2), 0

    def forward(self, x):
        self.calls += 1
        return (self.norm(x) * torch.log(self.weight)).sum(1)


def barrier(folder, attach, **settings):
    """A loop whose later evaluations are not finite with a high rate."""
    loop = Loop(None, lbfgs(None, **settings))
    torch.manual_seed(0)
    loop.model, loop.attached = Barrier(), attach
    loop.optimizer = lbfgs(None, **settings)(loop.model.parameters())
    loop.loss = lambda x, y: (loop.model(x) - 3).square().mean()
    loop.guard = (Guard.attach if attach else Guard)(loop.model, loop.optimizer, folder=folder)
    return loop


@pytest.mark.parametrize("attach", [False, True])
def test_an_evaluation_that_is_not_finite_undoes_the_step(tmp_path, attach):
    loop = barrier(tmp_path, attach, lr=0.01)
    data = [(torch.randn(8, 2), torch.zeros(8)) for _ in range(4)]
    loop.run(data[:3])
    assert loop.guard.last.applied
    before, calls = loop.everything(), loop.model.calls
    loop.optimizer.param_groups[0]["lr"] = 5.0
    loop.run(data[3:], first=False)
    loop.optimizer.param_groups[0]["lr"] = 0.01
    after = loop.everything()
    assert equal(before[:2], after[:2])
    assert loop.model.calls == calls + 1, "as after the first evaluation"
    assert loop.guard.skips["update"] == 1
    assert loop.guard.machine_faults == 0
    [incident] = loop.guard.incidents
    assert "log of a negative number" in incident.verdict
    assert "test_closures_in_the_step.py" in incident.fix[0], "the line of the model's own code"
    loop.run(data[:1], first=False)
    assert loop.guard.last.applied


@pytest.mark.parametrize("attach", [False, True])
def test_an_error_in_a_later_evaluation_puts_the_start_back(tmp_path, attach):
    loop = Loop(tmp_path, lbfgs(None), attach)
    loop.run(batches(2))
    before, usual, calls = loop.everything(), loop.loss, []

    def fails(x, y):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the third evaluation")
        return usual(x, y)

    loop.loss = fails
    with pytest.raises(RuntimeError, match="the third evaluation"):
        loop.run(batches(1))
    assert equal(before[:2], loop.everything()[:2])
    loop.loss = usual
    loop.run(with_nan(batches(2), 0))
    assert loop.guard.last.applied
    assert loop.guard.skipped == 1
    assert loop.guard.incidents[0].cause == "poison_input", "forward calls are recorded as before"


class Flips(torch.optim.LBFGS):
    """An LBFGS whose step leaves a NaN, once: a fault of the machine."""

    faulty = False

    def step(self, closure):
        loss = super().step(closure)
        if self.faulty:
            type(self).faulty = False
            with torch.no_grad():
                self._params[0][0] = math.nan
        return loss


def test_a_fault_of_the_machine_is_taken_again_from_the_first_evaluation(tmp_path):
    data = batches(6)
    ends = []
    for faulty in (False, True):
        loop = Loop(tmp_path, lambda p: Flips(p, lr=0.5, max_iter=4))
        loop.run(data[:3])
        Flips.faulty = faulty
        loop.run(data[3:], first=False)
        assert loop.guard.machine_faults == int(faulty)
        ends.append((*loop.everything(), loop.model.calls))
    assert equal(*ends)


def test_a_first_evaluation_that_was_wrong_once_is_computed_again(tmp_path):
    data, ends, last = batches(5), [], []
    for faulty in (False, True):
        loop = Loop(tmp_path, lbfgs(None))
        loop.run(data[:3])
        usual, once = loop.loss, iter([math.nan] * faulty)
        loop.loss = lambda x, y, usual=usual, once=once: usual(x, y) * next(once, 1.0)
        loop.run(data[3:4], first=False)
        assert loop.guard.machine_faults == int(faulty)
        last.append(loop.guard.last.loss)
        loop.run(data[4:], first=False)
        ends.append(loop.everything())
    assert equal(*ends)
    assert last[0] == last[1]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_rollback_restores_the_curvature(tmp_path, search):
    policy = RollbackGuard(snapshot_every=3, healthy_after=1, patience=2, lr_factor=1.0, snapshots=1)
    loop = Loop(tmp_path, lbfgs(search), policy=policy, max_incidents=0)
    twin = Loop(None, lbfgs(search))
    loop.run(batches(3))
    wanted = loop.everything()[:2]
    twin.run(batches(3), plainly=True)
    for seed in (3, 4):  # the second time, what the first has restored must not have changed
        loop.run(batches(2, seed=seed))
        loop.run([*with_nan(batches(1), 0), *with_nan(batches(1, seed=9), 0)])
        assert loop.guard.rolled_back
        assert equal(wanted, loop.everything()[:2])
    loop.run(batches(2, seed=5))
    twin.run(batches(2, seed=5), plainly=True)
    assert equal(twin.everything()[:2], loop.everything()[:2])


def test_what_would_change_the_first_evaluation_only_is_refused(tmp_path):
    for options, message in (
        ({"max_norm": 1.0}, r"max_norm=1\): LBFGS compares gradients of several evaluations"),
        ({"precision": "fp16"}, r"precision='fp16'\): LBFGS .* no loss scale fits"),
        ({"scaler": torch.amp.GradScaler("cpu")}, r"scaler=\.\.\.\): LBFGS"),
    ):
        with pytest.raises(ConfigError, match=message):
            Loop(tmp_path, lbfgs(None), **options)
    loop = Loop(tmp_path, lbfgs(None), precision="bf16")
    loop.run(batches(2))
    assert loop.guard.last.applied


def test_all_evaluations_run_under_the_autocast_of_the_first(tmp_path):
    model, seen = network(), []
    guard = Guard(model, torch.optim.LBFGS(model.parameters(), max_iter=3), folder=tmp_path)

    def closure(x, y):
        outputs = model(x)
        seen.append(outputs.dtype)
        return F.cross_entropy(outputs.float(), y)

    with torch.autocast("cpu", torch.bfloat16):
        guard.backward(closure, batch=batches(1)[0])
    guard.update()
    assert len(seen) > 1
    assert {*seen} == {torch.bfloat16}
