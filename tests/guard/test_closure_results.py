"""A closure may return more than the loss; several guards speak by name; a bound of 0 does not clip."""

import json
import math

import pytest
import torch

from stabletrain import Guard
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.policy import SkipGuard
from tests.guard.given import Loop, batches, bits, network, same


def trained(folder, closure_of, **options):
    """A guard after five steps, the fourth with a NaN, and what the steps returned."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, folder=folder, **options)
    returned = []
    for number, (x, y) in enumerate(batches(5)):
        x = torch.where(torch.tensor(number == 3), math.nan, x)
        returned.append(guard.step(closure_of(model), batch=(x, y)))
    return guard, bits(model, optimizer), returned


def loss_alone(model):
    return lambda x, y: torch.nn.functional.cross_entropy(model(x), y)


def loss_and_more(model):
    def closure(x, y):
        logits = model(x)
        return torch.nn.functional.cross_entropy(logits, y), {"logits": logits, "classes": 3}, "text"

    return closure


def test_what_a_closure_returns_beside_the_loss_is_returned_and_changes_nothing(tmp_path):
    alone, weights, losses = trained(tmp_path / "alone", loss_alone)
    guard, others, returned = trained(tmp_path / "more", loss_and_more)
    assert same(weights, others)
    assert [str(loss) for loss, *_ in returned] == [str(loss) for loss in losses]
    for loss, more, text in returned:
        assert (loss.requires_grad, more["logits"].requires_grad) == (False, False)
        assert (more["logits"].shape[1], more["classes"], text) == (3, 3, "text")
    assert guard.skipped == alone.skipped == 1
    assert [found.cause for found in guard.incidents] == [found.cause for found in alone.incidents] == ["poison_input"]


def test_of_several_micro_batches_each_returns_its_own(tmp_path):
    loop = Loop(tmp_path)
    closure = loss_and_more(loop.model)
    found = [loop.guard.backward(lambda x, y: (closure(x, y)[0] / 2, len(x)), batch=batch) for batch in batches(2)]
    assert [rows for _, rows in found] == [8, 8]
    assert float(loop.guard.update()) == pytest.approx(sum(float(loss) for loss, _ in found))


@pytest.mark.parametrize("value", [(), (torch.tensor(1.0),), ("loss", 1), [torch.tensor(1.0), 2]])
def test_a_tuple_that_does_not_begin_with_a_loss_is_refused(tmp_path, value):
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="the closure returned a"):
        loop.guard.step(lambda: value)


@pytest.mark.parametrize("bound", [0, 0.0])
def test_a_bound_of_zero_does_not_clip(tmp_path, bound):
    _, weights, _ = trained(tmp_path / "none", loss_alone)
    guard, others, _ = trained(tmp_path / "zero", loss_alone, max_norm=bound)
    assert same(weights, others)
    assert guard.last.clip_coef == 1.0
    Guard.attach(model := network(), torch.optim.SGD(model.parameters(), lr=0.1), max_norm=bound, folder=tmp_path)


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_guard_with_a_name_begins_its_lines_events_and_halt_with_it(tmp_path, caplog):
    trained(tmp_path / "named", loss_alone, name="critic")
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all(line.startswith("critic: ") for line in lines)
    assert {event["guard"] for event in events(tmp_path / "named")} == {"critic"}
    with pytest.raises(TrainingHalted, match=r"^critic: step 4: "):
        trained(tmp_path / "halts", loss_alone, name="critic", policy=SkipGuard(max_consecutive=1))
    trained(tmp_path / "unnamed", loss_alone)
    assert not any("guard" in event for event in events(tmp_path / "unnamed"))
