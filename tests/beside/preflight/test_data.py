"""What is wrong with the data is found with its numbers, its place and its line; sound data pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.checks import check_loop
from stabletrain.beside.preflight.data import Targets, data_of, of_input, of_marks
from stabletrain.beside.preflight.tracing import Input

CLASSES, ROWS, SIZE = 3, 48, 8
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = (torch.arange(ROWS) // 2) % CLASSES  # each rank has all classes
IGNORED = -100


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def loop(change=lambda x, y, step, rank: (x, y), loss=mean_loss, step_of=lambda step, rank: (step, rank), **parts):
    """Returns a function that makes a loop: three batches of eight rows on each of two ranks."""

    def make():
        model = nn.Linear(4, CLASSES)

        def batch(step, rank=0):
            taken, rank_of = step_of(step, rank)
            epoch, place = divmod(taken, 3)
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))[rank_of::2]
            rows = order[place * SIZE :][:SIZE]
            return change(X[rows], Y[rows], step, rank)

        known = {"model": model, "optimizers": [torch.optim.SGD(model.parameters(), lr=0.1)], "batch": batch}
        return {**known, "loss": lambda batch: loss(model, batch), "epoch": 3, "ranks": 2, **parts}

    return make


def said(make):
    return check_loop(make, ["data"])


def only(make):
    """Returns the only finding."""
    [finding] = said(make)
    return finding


def test_sound_data_pass():
    finding = only(loop())
    assert (finding.verdict, finding.text) == ("passed", "6 batches with 48 rows looked at, of 2 ranks")


def test_a_batch_that_comes_again_within_an_epoch_is_named_with_the_line_of_the_batches():
    finding = said(loop(step_of=lambda step, rank: (step // 2, rank)))[0]
    assert finding.verdict == "fault"
    assert finding.text.startswith(
        "1 of 3 batches within an epoch repeat an earlier one (batch 1 has the rows of batch 0"
    )
    assert finding.line.startswith(__file__)
    assert "next(iter(loader))" in finding.fix


def test_the_same_rows_in_another_order_are_the_same_batch():
    rolled = lambda x, y, step, rank: (x.roll(step, 0), y.roll(step, 0))  # noqa: E731
    assert only(loop(rolled)).verdict == "passed"
    assert said(loop(rolled, step_of=lambda step, rank: (0, rank)))[0].text.startswith("2 of 3 batches")


def window(stride, epoch=4, mixed=False):
    """Returns a `batch` whose batches begin so many rows after the one before."""

    def batch(step, rank=0):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step // epoch))[rank::2]
        rows = order[stride * (step % epoch) :][:SIZE]
        rows = rows[torch.randperm(SIZE, generator=torch.Generator().manual_seed(step))] if mixed else rows
        return X[rows], Y[rows]

    return batch


def test_batches_that_overlap_with_the_one_before_are_told_with_the_number_of_rows():
    finding = said(loop(batch=window(2), epoch=4))[0]
    assert (finding.verdict, finding.places) == ("fault", ("batch",))
    assert finding.text == (
        "each batch begins with the last 6 of the 8 rows of the one before, on rank 0: 14 distinct rows in the 32 of 4 "
        "batches"
    )
    assert finding.fix.startswith("begin each batch where the one before ends")


def test_batches_that_overlap_up_to_a_shorter_last_one():
    finding = said(loop(batch=window(4, epoch=6), epoch=6))[0]
    assert finding.verdict == "fault"
    assert (
        "the last 4 of the 8 rows of the one before, on rank 0: 24 distinct rows in the 44 of 6 batches" in finding.text
    )


def test_a_window_of_the_latest_rows_may_be_meant_without_epochs():
    [finding] = [
        each for each in said(loop(batch=window(2, epoch=9), epoch=0)) if "begins with the last 6 of" in each.text
    ]
    assert finding.verdict == "note"


def test_rows_that_come_again_by_chance_or_at_a_seam_are_no_overlap():
    assert only_note(said(loop(batch=window(2, mixed=True), epoch=4))).text.startswith("56% of the rows come more than")
    assert only(loop(batch=window(6), epoch=4)).verdict == "passed"  # two rows may be padding
    assert only(loop(batch=window(8), epoch=3)).verdict == "passed"


def test_a_repetition_may_be_a_new_epoch_if_its_length_is_unknown():
    finding = said(loop(step_of=lambda step, rank: (step % 3, rank), epoch=0))[0]
    assert (finding.verdict, finding.text[:33]) == ("note", "the data begin anew after 3 batch")


def test_an_order_that_is_the_same_in_each_epoch_is_a_note():
    finding = only_note(said(loop(step_of=lambda step, rank: (step % 3, rank))))
    assert "the second epoch begins with the same batch as the first, after 3 batches" in finding.text


def only_note(findings):
    [note] = [each for each in findings if each.verdict == "note"]
    assert not [each for each in findings if each.verdict == "fault"]
    return note


@pytest.mark.parametrize(
    ("step_of", "text"),
    [
        (lambda step, rank: (step, 0), "3 of 3 batches of rank 1 are batches of rank 0 too (its batch 2 is batch 2"),
        (lambda step, rank: (step, rank if step % 2 else 0), "2 of 3 batches of rank 1"),
        (
            lambda step, rank: (step + rank, 0),
            "2 of 3 batches of rank 1 are batches of rank 0 too (its batch 1 is batch 2",
        ),
    ],
)
def test_ranks_with_the_same_batches_are_found_also_a_step_later(step_of, text):
    finding = said(loop(step_of=step_of))[0]
    assert finding.verdict == "fault"
    assert finding.text.startswith(text)
    assert finding.places == ("batch", "rank")
    assert "DistributedSampler" in finding.fix


def test_ranks_that_shuffle_the_same_rows_each_for_itself_are_found():
    def batches(rank):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(rank))
        return [(X[rows], Y[rows]) for rows in order.split(SIZE)]

    finding = data_of([batches(0), batches(1)], epoch=6)[0]
    assert finding.verdict == "fault"
    assert finding.text.startswith("48 of 48 rows of rank 1 come on rank 0 too")


def test_rows_that_are_drawn_with_replacement_or_are_few_are_no_fault():
    def batches(rank, kinds):
        rows = torch.randint(kinds, (6, SIZE), generator=torch.Generator().manual_seed(rank))
        return [(X[each], Y[each]) for each in rows]

    for kinds in (ROWS, 4):
        assert not [
            each for each in data_of([batches(0, kinds), batches(1, kinds)], epoch=6) if each.verdict == "fault"
        ]


def noisy(rank_of_rows=0, noise=0.05, integers=lambda rows: rows, fixed=False):
    """Returns the batches of a rank: its rows with noise of its own, and an integer of each."""

    def batches(rank):
        order = torch.arange(ROWS) if fixed else torch.randperm(ROWS, generator=torch.Generator().manual_seed(7))
        order = order[rank_of_rows * rank :: 2]
        own = torch.Generator().manual_seed(rank)
        return [(X[rows] + noise * torch.randn(SIZE, 4, generator=own), integers(rows)) for rows in order.split(SIZE)]

    return [batches(0), batches(1)]


def test_the_same_rows_on_each_rank_with_other_noise_are_found_by_their_integers():
    [finding] = data_of(noisy(), epoch=3)
    assert (finding.verdict, finding.places) == ("fault", ("batch", "rank"))
    assert finding.text.startswith("all 24 rows of rank 1 have the integers (labels, lengths, tokens) of those of rank")
    assert data_of(noisy(rank_of_rows=1), epoch=3)[0].verdict == "passed"


def test_the_same_integers_may_be_meant_if_they_do_not_name_a_row_or_all_else_is_different():
    assert data_of(noisy(noise=9.0), epoch=3)[0].verdict == "note"
    assert data_of(noisy(integers=lambda rows: Y[rows]), epoch=3)[0].verdict == "note"


def test_the_same_integers_are_no_surprise_if_they_are_few_or_in_a_fixed_order():
    one_class, in_order = (lambda rows: 0 * rows), (lambda rows: torch.arange(len(rows)))
    by_batch = lambda rows: 0 * rows + rows[0] // 16  # noqa: E731
    assert data_of([each[:1] for each in noisy(fixed=True)], epoch=1)[0].verdict == "passed"  # the order is not known
    for integers in (one_class, in_order, by_batch):
        [finding] = data_of(noisy(rank_of_rows=1, integers=integers, fixed=True), epoch=3)
        assert finding.verdict == "passed"


@pytest.mark.parametrize("value", [IGNORED, 2])
def test_a_rank_without_labels_is_named(value):
    finding = only(loop(lambda x, y, step, rank: (x, torch.full_like(y, value) if rank else y)))
    says = "ignored" if value == IGNORED else "2"
    assert finding.verdict == "fault"
    assert finding.text.startswith(f"all targets in batch[1] are {says} on rank 1, in 24 rows, but only in ")
    assert finding.places == ("batch[1]", "rank")
    assert finding.line.startswith(__file__)  # where the targets reach the loss


def test_a_rare_label_that_one_rank_lacks_is_no_fault():
    assert only(loop(lambda x, y, step, rank: (x, (X[0] == x).all(1).long()))).verdict != "fault"


def test_a_rank_whose_inputs_are_all_0_is_named_but_not_a_mask():
    finding = only(loop(lambda x, y, step, rank: (x * (1 - rank), y)))
    assert finding.text.startswith("all values of the inputs (batch[0]) are 0 on rank 1")

    def with_mask(x, y, step, rank):
        return x, y, torch.full((SIZE,), rank)

    assert only(loop(with_mask, loss=lambda model, batch: mean_loss(model, batch[:2]))).verdict == "passed"


def test_targets_that_are_all_the_same_are_found_also_if_the_loss_makes_them():
    raw = only(loop(lambda x, y, step, rank: (x, y // 10)))
    assert raw.verdict == "fault"
    assert raw.text == "all of the 48 targets in batch[1] that count are 0: there is nothing to learn from them"
    made = only(loop(loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1] // 10)))
    assert made.verdict == "fault"
    assert made.text.startswith("all of the 48 targets of cross_entropy, made of batch[1] that count are 0")


def test_constant_targets_that_are_not_of_the_data_or_not_of_a_prediction_are_no_fault():
    def residual(model, batch):
        left = model(batch[0]).sum(1) - batch[1]
        return F.mse_loss(left, torch.zeros_like(left))

    def adversarial(model, batch):
        scores = model(batch[0])[:, 0]
        fakes = model(-batch[0])[:, 0]
        return F.mse_loss(scores, torch.ones_like(batch[0][:, 0])) + F.mse_loss(fakes, torch.zeros_like(fakes))

    def given(model, batch):  # a residual whose targets are in the batch
        return F.mse_loss(model(batch[0]).sum(1) - 1, 0.0 * batch[1])

    assert only(loop(loss=residual)).verdict == "passed"
    assert only(loop(loss=adversarial)).verdict == "passed"
    assert only_note(said(loop(loss=given))).text.startswith("all of the 48 targets of mse_loss")


def test_labels_out_of_range_are_found_by_the_loss_that_refuses_them_or_makes_them_one_hot():
    def begins_at_1(x, y, step, rank):
        return x, y + 1

    refused = only(loop(begins_at_1))
    text = "labels (targets in batch[1]) are 1 to 3, and the head has 3 classes (0 to 2): 16 of 48 are out of range"
    assert (refused.verdict, refused.text, refused.fix) == ("fault", text, "subtract 1 from the labels")

    def one_hot(model, batch):
        return F.cross_entropy(model(batch[0]), (batch[1][:, None] == torch.arange(CLASSES)).float())

    assert only(loop(begins_at_1, loss=one_hot)).text == f"{text}; made one-hot, they are rows of 0 and have no loss"
    assert only(loop(loss=one_hot)).verdict == "passed"


def test_labels_that_are_shifted_by_one_are_found():
    wide = nn.Linear(4, CLASSES + 1)
    above = only(loop(lambda x, y, step, rank: (x, y + 1), loss=lambda model, batch: mean_loss(wide, batch)))
    assert (above.verdict, "no label is 0, and all others occur" in above.text) == ("fault", True)
    below = only(
        loop(
            lambda x, y, step, rank: (x, y - 1),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], ignore_index=-1),
        )
    )
    assert (below.verdict, "no label is 2, and 16 of 48 are -1, which is ignored" in below.text) == ("fault", True)


def tokens(kept):
    """Returns a loop whose targets are tokens, `[rows, 4]`, of which only those count that `kept` says."""
    time = torch.arange(4)

    def change(x, y, step, rank):
        return x, ((y[:, None] + time) % CLASSES).masked_fill(~kept(torch.arange(SIZE)[:, None], time), IGNORED)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0][:, None] * (1 + time[:, None])).flatten(0, 1), batch[1].flatten())

    return loop(change, loss)


def test_batches_with_hardly_a_row_that_has_a_target_are_a_fault_and_few_targets_a_note():
    finding = only(tokens(lambda row, time: (row == 0) & (time < 2)))
    assert finding.verdict == "fault"
    assert "180 of 192 targets in batch[1] are ignored (ignore_index=-100), and 42 of 48 rows" in finding.text
    assert only(tokens(lambda row, time: (row % 2 == 0) & (time == 0))).verdict == "passed"
    assert only(tokens(lambda row, time: time < 1)).verdict == "passed"


@pytest.mark.parametrize(
    ("change", "text", "fix"),
    [
        (lambda x: (40 * x + 128).clamp(0, 255).round(), ", as bytes have", "divide by 255"),
        (lambda x: 100 * x, ", far from 0 and 1", "standardize"),
        (lambda x: (x / 255 - 0.45) / 0.225, "nearly constant", "standardize them once"),
        (lambda x: x / 1e3, "too small for the first layer", "divide by their own spread"),
        (
            lambda x: torch.cat([x[:, :3], 2e4 + x[:, 3:]], 1),
            "column 3 of the inputs (batch[0]) has mean 2e+04",
            "standardize it",
        ),
    ],
)
def test_inputs_that_are_not_scaled_are_named_with_what_is_wrong(change, text, fix):
    finding = only(loop(lambda x, y, step, rank: (change(x), y)))
    assert finding.verdict == "fault"
    assert text in finding.text
    assert finding.places == ("batch[0]",)
    assert finding.fix.startswith(fix)


def test_inputs_that_the_model_scales_itself_or_that_are_sparse_are_no_fault():
    def scaled(model, batch):
        return mean_loss(model, ((batch[0] - 128) / 40, batch[1]))

    assert only(loop(lambda x, y, step, rank: (40 * x + 128, y), loss=scaled)).verdict == "passed"
    assert only(loop(lambda x, y, step, rank: (x.sigmoid(), y))).verdict == "passed"
    words = F.one_hot(torch.arange(32), 10**5).float()
    assert of_input(Input(words, torch.full((2, 10**5), 1e-3), True, ("batch",), "", "")) == []


def test_batches_that_are_given_are_checked_without_a_model():
    batches = [{"image": X[:SIZE], "label": Y[:SIZE]}, {"image": X[SIZE:16], "label": Y[SIZE:16] + 9}]
    [finding] = data_of([batches], [Targets("batch['label']", classes=CLASSES, ignored=IGNORED)])
    assert (finding.verdict, finding.places) == ("fault", ("batch['label']",))
    assert "8 of 16 are out of range" in finding.text
    assert data_of([batches[:1]])[0].verdict == "passed"


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(24).view(8, 3).to(dtype) for dtype in (torch.bfloat16, torch.uint8, torch.complex64)),
        *(torch.arange(48.0).view(6, 8).T, torch.tensor(1.0), torch.zeros(0, 3), torch.zeros(8, 3, dtype=torch.bool)),
    ],
)
def test_tensors_of_any_type_shape_and_layout_are_read(tensor):
    [*_, finding] = data_of([[(tensor,)], [(tensor,)]])
    told = tensor.ndim > 0 and len(tensor) > 0 and tensor.dtype != torch.bool
    assert ("batches of rank 1 are batches of rank 0 too" in finding.text) == told


def test_a_loss_that_fails_for_another_reason_and_batches_without_tensors_are_not_checked():
    def fails(model, batch):
        raise ValueError("no such thing")

    finding = said(loop(loss=fails))[-1]
    assert (finding.verdict, finding.text) == ("not checked", "the loss failed with ValueError: no such thing")
    empty = loop(lambda x, y, step, rank: ("text",))
    assert only(empty).text == "the batches hold no tensors"


# ---- numbers that pick a place


def picked(model, batch):
    """Cross-entropy by hand."""
    x, y = batch
    return -model(x).log_softmax(1)[torch.arange(len(y)), y].mean()


def shifted(x, y, step, rank):
    """Subtracts 1 from labels that begin at 0."""
    return x, y - 1


def test_a_label_that_an_index_takes_for_the_last_class_is_out_of_range():
    finding = said(loop(shifted, picked))[0]
    assert finding.verdict == "fault"
    assert finding.text.startswith("labels (batch[1]) are -1 to 1, and pick from 3 classes (0 to 2): ")
    assert finding.text.endswith("of 8 are out of range, and are counted from the other end")
    assert finding.places == ("batch[1]",)


def test_a_label_is_found_where_the_loss_subtracts_or_uses_the_sum_of_the_exponentials():
    def by_hand(model, batch):
        logits, y = model(batch[0]), batch[1] - 1
        return (logits.logsumexp(1) - logits[torch.arange(len(y)), y]).mean()

    assert said(loop(loss=by_hand))[0].text.startswith("labels (batch[1]) are -1 to 1")


def test_a_label_of_a_later_batch_is_found():
    def once(x, y, step, rank):
        return x, y - int(step == 2)

    assert said(loop(once, picked))[0].text.startswith("labels (batch[1]) are -1 to 1")


def test_a_label_of_minus_one_that_a_mask_leaves_out_is_sound():
    def masked(model, batch):
        x, y = batch
        logs = model(x).log_softmax(1)[torch.arange(len(y)), y]
        return -(logs * (y >= 0)).sum() / (y >= 0).sum()

    assert only(loop(shifted, masked)).verdict == "passed"


@pytest.mark.parametrize(
    "pick",
    [
        lambda logs, y: logs.gather(1, y[:, None]),
        lambda logs, y: torch.take_along_dim(logs, y[:, None], 1),
        lambda logs, y: logs[range(len(y)), y],
        lambda logs, y: logs * F.one_hot(y, CLASSES),
        lambda logs, y: logs * F.embedding(y, torch.eye(CLASSES, requires_grad=True)),
    ],
)
def test_a_number_with_which_the_loss_fails_is_named(pick):
    def beyond(x, y, step, rank):
        return x, y + 1

    def loss(model, batch):
        return -pick(model(batch[0]).log_softmax(1), batch[1]).mean()

    [finding] = [each for each in said(loop(beyond, loss)) if each.verdict == "fault"]
    assert "(batch[1]) are 1 to 3, and pick from 3 " in finding.text
    assert "of 8 are out of range, and " in finding.text


def test_minus_one_for_the_last_place_in_a_sequence_may_be_meant():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(1, 8), nn.Linear(8, CLASSES)

        def forward(self, x, last):
            return self.head(self.body(x[..., None])[torch.arange(len(x)), last])

    def ends(x, y, step, rank):
        return x, y, torch.arange(len(x)) % 3 - 1

    def make():
        model = Last()

        def loss(batch):
            return F.cross_entropy(model(batch[0], batch[2]), batch[1])

        return {**loop(ends)(), "model": model, "loss": loss}

    [finding] = [each for each in said(make) if each.verdict != "passed"]
    assert (finding.verdict, finding.places) == ("note", ("batch[2]",))


# ---- shares


def signs(x, y, step, rank):
    return x, (2.0 * (x > 0) - 1)[:, :CLASSES]


def binary(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def test_targets_of_a_binary_cross_entropy_that_are_not_in_0_to_1_are_named():
    [finding] = said(loop(signs, binary))
    assert (finding.verdict, finding.places) == ("fault", ("batch[1]",))
    assert finding.text.startswith(
        "targets of binary_cross_entropy_with_logits (batch[1]) are -1 to 1, and 15 of 24 are not in 0 to 1: the loss"
    )
    assert finding.line.startswith(__file__)
    assert only(loop(lambda *args: (args[0], signs(*args)[1] / 2 + 0.5), binary)).verdict == "passed"


def test_they_are_found_in_a_later_batch_and_if_the_loss_refuses_them():
    later = lambda x, y, step, rank: (x, (x > 0)[:, :CLASSES] * (1.0 + (step == 1)))  # noqa: E731
    assert "are 0 to 2" in only(loop(later, binary)).text
    refuses = lambda model, batch: F.binary_cross_entropy(model(batch[0]).sigmoid(), batch[1])  # noqa: E731
    assert only(loop(signs, refuses)).text.endswith("are not in 0 to 1: it fails")


def test_targets_that_a_mask_leaves_out_may_have_any_number():
    def masked(model, batch):
        each = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
        return (each * (batch[1] >= 0)).sum()

    missing = lambda x, y, step, rank: (x, 1.0 * (x > 0)[:, :CLASSES] - 1.0 * (x[:, 1:] > 1))  # noqa: E731
    assert only(loop(missing, masked)).verdict == "passed"
    assert only(loop(missing, binary)).verdict == "fault"


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "passed"), (2.0, "note")])
def test_shares_of_classes_have_the_sum_1(factor, verdict):
    change = lambda x, y, step, rank: (x, factor * (x[:, 1:]).softmax(1))  # noqa: E731
    finding = only(loop(change))
    assert finding.verdict == verdict
    assert ("have the sum 2 to 2 in 8 of 8 places" in finding.text) == (verdict == "note")


# ---- a CTC loss


def spoken(letters, lengths):
    """Returns a loop with two letters a row, made of the class, and a loss that hears them."""

    def change(x, y, step, rank):
        return x, letters(torch.stack([1 + y % 2, 1 + y // 2], 1), rank), lengths(torch.full_like(y, 2), rank)

    def loss(model, batch):
        logs = model(batch[0] * torch.linspace(0.5, 1, 5)[:, None, None]).log_softmax(-1)
        return F.ctc_loss(logs, batch[1], torch.full((SIZE,), 5), batch[2], reduction="sum") / batch[2].sum().clamp(
            min=1
        )

    return loop(change, loss)


def test_letters_that_are_all_the_same_or_missing_on_a_rank_are_found():
    assert only(spoken(lambda letters, _: letters, lambda lengths, _: lengths)).verdict == "passed"
    same = only(spoken(lambda letters, _: 0 * letters + 2, lambda lengths, _: lengths))
    assert same.verdict == "fault"
    assert same.text.startswith("all of the 96 targets of ctc_loss, made of batch[1], batch[2] that count are 2")
    empty = only(spoken(lambda letters, _: letters, lambda lengths, rank: lengths * (1 - rank)))
    assert (empty.verdict, empty.places) == ("fault", ("batch[1], batch[2]", "rank"))
    assert empty.text.startswith("all targets of ctc_loss, made of batch[1], batch[2] are ignored on rank 1, in 24")


def test_padding_of_a_ctc_loss_is_no_letter_and_a_letter_out_of_range_is_named():
    padded = spoken(lambda letters, _: F.pad(letters, (0, 2), value=-1), lambda lengths, _: lengths)
    assert only(padded).verdict == "passed"
    beyond = only(spoken(lambda letters, _: letters + 1, lambda lengths, _: lengths))
    assert "are 2 to 3, and the head has 3 classes (0 to 2)" in beyond.text


# ---- marks of missing values


def test_a_number_that_comes_often_and_is_far_from_all_others_is_noted():
    def normed(model, batch):
        return F.cross_entropy(model((batch[0] / 1000).clamp(-1, 1)), batch[1])

    finding = only_note(said(loop(lambda x, y, step, rank: (x.where(x < 0.5, -9999.0), y), normed)))
    assert finding.places == ("batch[0]",)
    assert " of 32 numbers in batch[0] are -9999, and all others are -" in finding.text


@pytest.mark.parametrize(
    "values",
    [
        torch.where(X > 1, 9.0, X),  # clipped
        torch.where(X > 1, 1e9, 0 * X),  # a mask
        torch.where(X.max() == X, 9999.0, X),  # one number
        torch.where(X > 1, 9999.0, 1000 * X),
        torch.where(X > 1, float("inf"), X),
    ],
)
def test_clipped_numbers_masks_and_rare_ones_are_no_marks(values):
    assert of_marks("batch[0]", values, "") == []


# ---- columns beside others


def joined(columns):
    """Returns a loop whose first layer gets an embedding and columns of the batch."""

    def make():
        model = nn.ModuleDict({"table": nn.Embedding(CLASSES, 4), "first": nn.Linear(8, 1)})

        def loss(model, batch):
            x, y = batch
            both = torch.cat([model["table"](y), columns(x)], -1).contiguous()
            return model["first"](both).square().mean()

        return {**loop()(), "model": model, "loss": lambda batch: loss(model, batch)}

    return make


def test_a_column_is_followed_to_its_place_beside_an_embedding():
    finding = said(joined(lambda x: torch.cat([x[:, :3], 480_000 + 1000 * x[:, 3:]], 1)))[0]
    assert finding.verdict == "fault"
    assert finding.text.startswith("column 3 of the inputs (batch[0]) has mean 4.8")
    assert finding.places == ("batch[0]", "first")


@pytest.mark.parametrize("columns", [lambda x: x, lambda x: 1e-4 * x, lambda x: 1 + 1e-3 * x])
def test_columns_beside_an_embedding_may_be_small_or_nearly_constant(columns):
    assert only(joined(columns)).verdict == "passed"
