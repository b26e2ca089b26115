"""The programs of docs/reference/guard.md, before and after: what people write, with and without a guard."""

import copy
import difflib
import inspect
import re

import pytest
import torch

from examples import guard_actor_critic, guard_by_hand, guard_gan, guard_lbfgs, guard_logits_and_loss
from tests.runs import ROOT

PROGRAMS = {
    "guard_actor_critic.py": (guard_actor_critic, guard_actor_critic.ActorCritic, guard_actor_critic.episodes),
    "guard_lbfgs.py": (guard_lbfgs, guard_lbfgs.network, guard_lbfgs.samples),
    "guard_by_hand.py": (guard_by_hand, guard_by_hand.Language, guard_by_hand.text),
    "guard_gan.py": (guard_gan, guard_gan.Networks, guard_gan.points),
    "guard_logits_and_loss.py": (guard_logits_and_loss, guard_logits_and_loss.Language, guard_logits_and_loss.text),
}

EACH = pytest.mark.parametrize(("program", "network", "data"), PROGRAMS.values(), ids=PROGRAMS)


def made(network, data, count, bad=None):
    """The model and the batches, from the same random numbers each time."""
    torch.manual_seed(0)
    model = network()
    return model, [*data(count, bad)]


def states(model, kept):
    """Copies of the weights, and of what the loop returned: its optimizers, or the tensors that it carries on."""
    several = kept if isinstance(kept, list | tuple) else [kept]
    found = [each.detach() if isinstance(each, torch.Tensor) else each.state_dict() for each in several]
    return copy.deepcopy([model.state_dict(), *found])


def held(model, kept):
    """What a bad batch may not change: of the GAN the discriminator, because the others do not read it."""
    return states(model.discriminator, kept[0]) if isinstance(model, guard_gan.Networks) else states(model, kept)


def equal(a, b):
    """Whether two values have the same bits, in tensors, lists and dicts."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@EACH
def test_on_healthy_data_every_bit_is_that_of_the_loop_before(tmp_path, program, network, data):
    model, batches = made(network, data, 22)
    kept = program.plain(model, batches)
    twin, batches = made(network, data, 22)
    guard, same = program.guarded(twin, batches, str(tmp_path))
    assert not guard.skipped
    assert equal(states(model, kept), states(twin, same))


@EACH
def test_a_bad_batch_changes_no_bit(tmp_path, program, network, data):
    model, batches = made(network, data, 12, 11)
    _, kept = program.guarded(model, batches[:-1], str(tmp_path))
    twin, batches = made(network, data, 12, 11)
    guard, same = program.guarded(twin, batches, str(tmp_path))
    assert not guard.last.applied
    assert equal(held(model, kept), held(twin, same))
    assert [each.path.name for each in guard.incidents] == ["step-00000012"]


@EACH
def test_without_the_guard_a_bad_batch_ends_the_training(program, network, data):
    model, batches = made(network, data, 12, 11)
    program.plain(model, batches)
    assert not all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_says_how_many_lines_change(name):
    before, after = (lines(getattr(PROGRAMS[name][0], function)) for function in ("plain", "guarded"))
    marks = [line[0] for line in difflib.ndiff(before, after)]
    page = (ROOT / "docs" / "reference" / "guard.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"\| `examples/{name}` \| .* \| (\d+) \| (\d+) \|", page)
    assert row == (str(marks.count("+")), str(marks.count("-")))


def lines(function):
    """The lines of a function's body, without its signature, its docstring and its return."""
    found = [line.strip().partition("  # ")[0] for line in inspect.getsource(function).splitlines()[2:-1]]
    return [line for line in found if line]
