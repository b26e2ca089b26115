"""Micro-batches against the whole batch, in steps that clip."""

import pytest
import torch
from torch import nn

from stabletrain.beside.preflight.accumulation import check
from stabletrain.beside.preflight.loop import Maker
from tests.beside.preflight.small import Net, count, maker, marked, micro_batches

BY_TARGETS = micro_batches(lambda part, batch: count(part) / count(batch))


def one_of(**parts):
    """Returns the only finding of a loop."""
    [found] = check(maker(**parts))
    return found


def strided(rows):
    """Every fourth row in each part."""
    return [torch.arange(start, rows, 4) for start in range(4)]


def uneven(rows):
    """Parts of different sizes."""
    return torch.arange(rows).split([3, 8, rows - 11])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("numbers", [None, strided, uneven])
def test_micro_batches_weighted_by_their_targets_pass(numbers, together):
    found = one_of(step=micro_batches(lambda part, batch: count(part) / count(batch), numbers, together=together))
    assert found.verdict == "passed"
    assert "micro-batches is that of the whole batch" in found.text


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("numbers", [None, strided, uneven])
def test_a_mean_of_means_is_found_however_the_batch_is_split(numbers, together):
    found = one_of(step=micro_batches(lambda part, _: len(part[0]) / 16, numbers, together=together))
    assert found.verdict == "fault"
    assert "weight each loss by its number of targets" in found.fix


def test_the_finding_says_which_weights_the_micro_batches_have_and_should_have():
    found = one_of(step=micro_batches(lambda *_: 1 / 4))
    parts = [tuple(each[start : start + 4] for each in maker()().batch(0)) for start in range(0, 16, 4)]
    right = ", ".join(f"{count(part) / sum(map(count, parts)):.3g}" for part in parts)
    assert f"weights 0.25, 0.25, 0.25, 0.25, in the mean over all targets {right}: a mean of means" in found.text
    assert found.line.rpartition(":")[0] == micro_batches.__code__.co_filename


@pytest.mark.parametrize(("factor", "says"), [(4, "their sum"), (1 / 4, "as if divided twice"), (0.5, "0.5 times")])
def test_a_wrong_factor_is_named(factor, says):
    step = micro_batches(lambda part, batch: factor * count(part) / count(batch))
    found = one_of(step=step)
    assert found.verdict == "fault"
    assert says in found.text


def test_parts_that_are_not_independent_are_not_compared_but_by_the_sum_of_their_weights():
    def normed():
        return Net(lambda net, x: nn.functional.batch_norm(x, None, None, training=True))

    right = one_of(model=normed, step=micro_batches(lambda *_: 1 / 4))
    assert right.verdict == "note"
    assert "batch normalization" in right.text
    assert one_of(model=normed, step=micro_batches(lambda *_: 1.0)).verdict == "fault"


def test_two_terms_that_are_divided_by_different_numbers_are_noted_with_how_far_the_gradient_is_off():
    def terms(model, batch):
        return model(batch[0]).square().mean(), marked(model, batch)

    def made(weight):
        def step_of(net, optimizers, loss):
            def step(batch):
                optimizers[0].zero_grad()
                for part in zip(*(each.split(4) for each in batch), strict=True):
                    rows, targets = terms(net, part)
                    (weight(part) * rows + count(part) / count(batch) * targets).backward()
                optimizers[0].step()

            return step

        return one_of(loss=lambda model, batch: sum(terms(model, batch)), step=step_of)

    assert made(lambda part: 1 / 4).verdict == "passed"
    found = made(lambda part: count(part) / count(maker()().batch(0)))
    assert found.verdict == "note"
    assert "the gradient of step, taken as 4 micro-batches, is not that of loss (the first batch): cosine" in found.text


def test_a_loss_that_takes_all_rows_together_is_said_not_to_fit():
    """Parts are halves of a window; `loss` carries a state for each of 16 rows."""

    def carried(model, batch):
        return (model(batch[0]) + torch.zeros(16, 1) - batch[1]).square().mean()

    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            for _ in range(2):
                loss(batch).backward()
            optimizers[0].step()

        return step

    found = one_of(loss=carried, step=made)
    assert found.verdict == "not checked"
    assert "carries a state for each row from batch to batch" in found.text
    assert "2 times as long" in found.text


def filled_up(net, optimizers, loss):
    """A step that fills up a batch with copies of its first row."""

    def step(batch):
        optimizers[0].zero_grad()
        loss(tuple(torch.cat([each, each[:1].expand(16 - len(each), -1)]) for each in batch)).backward()
        optimizers[0].step()

    return step


def test_a_last_batch_that_is_filled_up_with_copies_is_found_with_what_its_rows_count():
    def squared(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    sizes = {"rows": lambda number: 16 if number < 2 else 4, "epoch": 3}
    first, last = check(maker(loss=squared, step=filled_up, **sizes))
    assert (first.verdict, last.verdict) == ("passed", "fault")
    assert "is that of loss for full batches, of 16 rows, and not for the last batch of the epoch" in last.text
    assert "repeated or dropped (its rows count 3.25, 0.25, 0.25, 0.25 times as much as in loss)" in last.text
    assert [each.verdict for each in check(maker(loss=squared, **sizes))] == ["passed", "passed"]


def test_a_last_batch_that_is_wrong_for_another_reason_than_its_size_is_only_noted():
    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            own = 0.0 if len(batch[0]) == 16 or torch.equal(batch[0], maker()().batch(0)[0][:4]) else 1.0
            (loss(batch) + own * net.first.weight.square().sum()).backward()
            optimizers[0].step()

        return step

    found = check(maker(step=made, rows=lambda number: 16 if number < 2 else 4, epoch=3))
    assert [each.verdict for each in found] == ["passed", "note"]


def test_dropout_makes_no_difference():
    assert one_of(model=lambda: Net(lambda net, x: net.drop(x)), step=BY_TARGETS).verdict == "passed"


@pytest.mark.parametrize(("divided", "verdict"), [(4, "passed"), (1, "fault")])
def test_micro_batches_may_be_calls_of_step(divided, verdict):
    def made(net, optimizers, loss):
        calls = []

        def step(batch):
            calls.append(batch)
            (loss(batch) / divided).backward()
            if len(calls) % 4 == 0:
                optimizers[0].step()
                optimizers[0].zero_grad()

        return step

    assert one_of(loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), step=made).verdict == verdict


def test_a_smaller_last_batch_that_is_divided_as_the_others_is_found():
    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            (loss(batch) * len(batch[0]) / 16).backward()
            optimizers[0].step()

        return step

    sizes = {"rows": lambda number: 16 if number < 2 else 4, "epoch": 3}
    first, last = check(maker(step=made, **sizes))
    assert first.verdict == "passed"
    assert last.verdict == "fault"
    assert "the last batch of the epoch, number 2 (4 rows) is 0.25 times that of its mean loss" in last.text
    assert [each.verdict for each in check(maker(**sizes))] == ["passed", "passed"]


@pytest.mark.parametrize(("zeroed", "verdict"), [(False, "fault"), (True, "passed")])
def test_a_last_batch_without_update_must_leave_no_gradient(zeroed, verdict):
    def made(net, optimizers, loss):
        def step(batch):
            loss(batch).backward()
            if len(batch[0]) == 16:
                optimizers[0].step()
            if len(batch[0]) == 16 or zeroed:
                optimizers[0].zero_grad()

        return step

    found = check(maker(step=made, rows=lambda number: 4 if number == 2 else 16, epoch=3))[-1]
    assert found.verdict == verdict
    assert "gets no update" in found.text


class Heads(nn.Module):
    """Two heads on a trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def losses(self, batch):
        hidden = self.trunk(batch[0]).tanh()
        return [(head(hidden) - batch[1]).square().mean() for head in (self.one, self.two)]


def two_losses(weights, rows_of_part=lambda rows: 4):
    """Returns what is found of micro-batches of four rows whose two losses have these weights, by their number."""

    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            parts = [*zip(*(each.split(rows_of_part(len(each))) for each in batch), strict=True)]
            for part in parts:
                sum(w * each for w, each in zip(weights(len(parts)), net.losses(part), strict=True)).backward()
            optimizers[0].step()

        return step

    return one_of(model=Heads, loss=lambda net, batch: sum(net.losses(batch)), step=made)


@pytest.mark.parametrize("rows_of_part", [lambda rows: 4, lambda rows: -(-rows // 4)])
@pytest.mark.parametrize(
    ("second", "says"),
    [(lambda count: 1, "4 times that of the batch for two.weight"), (lambda count: count**-2, "0.25 times that")],
)
def test_one_of_two_losses_that_is_not_divided_is_found_by_the_parameters_of_its_head(second, says, rows_of_part):
    found = two_losses(lambda count: (1 / count, second(count)), rows_of_part)
    assert (found.verdict, found.places) == ("fault", ("two.weight",))
    assert says in found.text


def test_a_loss_that_counts_four_times_as_much_with_any_number_of_micro_batches_is_only_noted():
    assert two_losses(lambda count: (1 / count, 4 / count)).verdict == "note"
    assert two_losses(lambda count: (1 / count, 1 / count)).verdict == "passed"


def test_a_step_that_trains_something_else_is_only_noted():
    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            (loss(batch) + net.first.weight.square().sum()).backward()
            optimizers[0].step()

        return step

    found = one_of(step=made)
    assert found.verdict == "note"
    assert "the gradient of step is not that of loss" in found.text


@pytest.mark.parametrize("parts", [1, 4])
def test_a_gradient_whose_norm_is_set_is_only_noted(parts):
    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            for chosen in torch.arange(16).chunk(parts):
                (loss((batch[0][chosen], batch[1][chosen])) / parts).backward()
            gradients = [each.grad for each in net.parameters()]
            total = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients]))
            for each in gradients:
                each /= total
            optimizers[0].step()

        return step

    found = one_of(step=made)
    assert found.verdict == "note"
    assert "does not shrink with the loss" in found.text


def test_a_loss_that_is_reported_wrongly_is_noted():
    def made(net, optimizers, loss):
        step = BY_TARGETS(net, optimizers, loss)
        return lambda batch: step(batch) / 2

    found = one_of(step=made)
    assert found.verdict == "note"
    assert "but step returns the loss" in found.text


def test_loops_that_cannot_be_compared_say_why():
    loop = maker()()
    loop.step = None
    assert check(Maker(lambda: loop))[0].text == "make() returned no step"

    def twice(net, optimizers, loss):
        def step(batch):
            for _ in range(2):
                optimizers[0].zero_grad()
                loss(batch).backward()
                optimizers[0].step()

        return step

    assert "before the last backward call" in one_of(step=twice).text
    assert "no optimizer stepped in 32 calls" in one_of(step=lambda net, _, loss: lambda b: loss(b).backward()).text


def test_an_optimizer_of_copies_cannot_be_compared_and_that_is_said_once():
    def copies(net):
        return [torch.optim.SGD([each.detach().clone().requires_grad_() for each in net.parameters()], lr=0.1)]

    def made(net, optimizers, loss):
        def step(batch):
            net.zero_grad()
            loss(batch).backward()
            for copy, each in zip(optimizers[0].param_groups[0]["params"], net.parameters(), strict=True):
                copy.grad = each.grad
            optimizers[0].step()

        return step

    found = one_of(step=made, optimizers=copies, rows=lambda number: 16 - 8 * (number == 3), epoch=4)
    assert found.verdict == "not checked"
    assert found.text.startswith("the optimizers hold none of the model's parameters that the loss depends on")
