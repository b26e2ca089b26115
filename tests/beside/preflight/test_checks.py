"""`Guard.check`: the checks that a user's own loop gets, and what it must offer."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from stabletrain import Guard
from stabletrain.beside.preflight.checks import CHECKS
from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.report import Report
from stabletrain.errors import ConfigError


def make(**more):
    """Returns what a small script has."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))

    def batch(step, rank=0):
        start = 8 * (step % 3)
        return rows[start : start + 8, :4], rows[start : start + 8, 4:]

    def loss(batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return {"model": model, "optimizers": optimizer, "loss": loss, "batch": batch, **more}


def test_four_parts_are_enough_and_what_is_not_checked_says_what_it_needs():
    report = Guard.check(make)
    assert not report.faults, str(report)
    assert {each.check for each in report} == {*CHECKS}
    [resume] = [each for each in report if each.check == "resume"]
    assert resume.verdict == "not checked"
    assert "save" in resume.text


def test_some_checks_can_be_chosen():
    assert {each.check for each in Guard.check(make, only=["data", "structure"])} == {"structure", "data"}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: {"model": nn.Linear(1, 1)}, "make() returned no 'optimizers'; fix: return an object with model, "),
        (lambda: make(scheduler=3), "make() returned 'scheduler', which no check knows; did you mean schedulers?"),
        (lambda: make(model=3), "make() returned a model that is no torch.nn.Module: int"),
        (lambda: make(optimizers=[3]), "make() returned an optimizer that is no torch.optim.Optimizer: int"),
        (lambda: None, "make() returned no 'model'"),
    ],
    ids=["missing", "misspelt", "model", "optimizer", "nothing"],
)
def test_what_make_returns_is_refused_in_one_message(made, said):
    with pytest.raises(ConfigError) as refused:
        Guard.check(made)
    assert str(refused.value).startswith(said)


def test_a_check_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="there is no check 'resum'; the checks are structure, order"):
        Guard.check(make, only=["resum"])


def test_a_loop_that_is_not_made_anew_is_refused():
    parts = make()
    with pytest.raises(ConfigError, match="same model twice"):
        Guard.check(lambda: parts)


def test_nothing_but_fresh_loops_is_changed(request):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    own, switches = make(), (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    own["loss"](own["batch"](0)).backward()
    own["optimizers"].step()
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    weights = {name: each.clone() for name, each in own["model"].state_dict().items()}
    gradients = [each.grad.clone() for each in own["model"].parameters()]
    replaced = torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.__call__, torch.optim.Adam.step
    Guard.check(make)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    checks_types = request.config.getoption("--types")  # which looks at a random element of each list
    assert checks_types or random.getstate() == numbers[1]
    assert np.random.get_state()[1].tolist() == numbers[2]
    assert all(torch.equal(weights[name], each) for name, each in own["model"].state_dict().items())
    assert all(map(torch.equal, gradients, [each.grad for each in own["model"].parameters()]))
    assert switches == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    assert replaced == (
        torch.autograd.backward,
        torch.optim.Optimizer.zero_grad,
        nn.Module.__call__,
        torch.optim.Adam.step,
    )


def test_an_error_of_a_check_is_said_and_the_others_go_on(monkeypatch):
    monkeypatch.setitem(CHECKS, "structure", lambda make: 1 / 0)
    first, *_, last = Guard.check(make, only=["structure", "data"])
    assert (first.check, first.verdict) == ("structure", "not checked")
    assert first.text == "it failed with ZeroDivisionError: division by zero"
    assert last.check == "data"


def test_the_report_shows_verdict_line_and_fix():
    wrong = Finding("resume", "fault", "the moments are lost", ("optimizers.0",), "/x/train.py:7", "load them")
    report = Report(
        [wrong, Finding("data", "passed", "9 batches"), Finding("order", "not checked", "no step")], 1.234, 0.5
    )
    assert str(report).splitlines() == [
        "FAULT  resume        the moments are lost",
        "                     at   /x/train.py:7",
        "                     fix: load them",
        "ok     data          9 batches",
        "-      order         not checked: no step",
        "preflight: 1 fault, 0 notes, 1 passed, 1 not checked; 1.2 s, of which the compiler took 0.5 s",
    ]
    assert report.faults == [wrong]


def test_many_names_are_counted():
    assert listed([*"abcdef"]) == "a, b, c, d and 2 more"
    assert listed([*"abcd"]) == "a, b, c, d"


class Outer(torch.optim.Optimizer):
    """Steps another optimizer within its own step, as one for matrices does with the rest."""

    def __init__(self, parameters):
        super().__init__([*parameters], {"lr": 1e-2})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=1e-2)

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_made_of_another_updates_its_parameters_once():
    def made():
        parts = make()
        optimizer = Outer(parts["model"].parameters())

        def step(batch):
            optimizer.zero_grad()
            loss = parts["loss"](batch)
            loss.backward()
            optimizer.step()
            return loss

        return {**parts, "optimizers": optimizer, "step": step}

    report = Guard.check(made, only=["structure", "order", "accumulation"])
    assert {(each.check, each.verdict) for each in report} == {
        ("structure", "passed"),
        ("order", "passed"),
        ("accumulation", "passed"),
    }, str(report)
