"""All ranks read the same data, or the run is refused on every rank before anything is built."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import Batch, Transform
from stabletrain.trainer import same_data
from stabletrain.trainer.same_data import ROWS, on_all_ranks


class Numbers:
    """A data set of numbers; `changed` is the batch that differs, and the part of it."""

    def __init__(self, changed=None, part="inputs", **fingerprint):
        self.changed, self.part, self._fingerprint, self.read = changed, part, fingerprint, []
        if fingerprint:
            self.fingerprint = lambda: self._fingerprint

    def batch(self, step, size, split):
        self.read.append(step)
        batch = Batch(torch.arange(size) + step, torch.full((size,), step))
        if step == self.changed and self.part == "error":
            raise OSError("gone")
        if step == self.changed:
            part = getattr(batch, self.part).clone()
            part[-1] += 1
            batch = replace(batch, **{self.part: part})
        return batch


class Rows(Numbers):
    """The same, a few rows at a time."""

    def rows(self, step, size, split, rows):
        self.read.append(rows)
        return Numbers.batch(self, step, size, split).rows(rows)


def refusals(monkeypatch, *data):
    """What each rank of a run is told; its data set is built by a function."""
    told = []

    def gather(value):
        told.append(value)
        return everyones or [value]

    monkeypatch.setattr(same_data, "all_gather_object", gather)
    messages, everyones = [], []
    for collecting in (True, False):
        for rank, load in enumerate(data):
            try:
                on_all_ranks(Ranks(rank, len(data), rank, launched=True), load, 16)
                message = ""
            except Exception as error:
                message = f"{'' if isinstance(error, ConfigError) else type(error).__name__ + ': '}{error}"
            messages += [] if collecting else [message]
        everyones = [*told]
    assert len(json.dumps(everyones)) < 2000 * len(data), "the ranks exchange a few bytes"
    return messages


@pytest.mark.parametrize("kind", [Numbers, Rows])
def test_equal_data_are_accepted(monkeypatch, kind):
    assert refusals(monkeypatch, *[lambda: kind(name="here", hash="a")] * 3) == [""] * 3
    moved = [lambda: kind(name="here", hash="a"), lambda: kind(name="there", hash="a")]
    assert refusals(monkeypatch, *moved) == ["", ""]


@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("number", [0, 2])
def test_another_batch_is_refused_on_every_rank_with_the_first_rank_that_differs(monkeypatch, part, number):
    messages = refusals(monkeypatch, Numbers, Numbers, lambda: Numbers(number, part), lambda: Numbers(0))
    assert len({*messages}) == 1
    assert f"data: rank 2 reads other data than rank 0: {part} of batch {number} differ (sha256 " in messages[0]
    assert "all ranks must read equal batches: put the same files" in messages[0]


def test_another_fingerprint_is_refused(monkeypatch):
    messages = refusals(monkeypatch, lambda: Numbers(hash="a"), lambda: Numbers(hash="b"))
    assert len({*messages}) == 1
    assert "rank 1 reads other data than rank 0: fingerprint hash=b, on rank 0 a; " in messages[0]
    assert "other keys" in refusals(monkeypatch, lambda: Numbers(hash="a"), Numbers)[0]


def test_data_that_one_rank_cannot_open_or_read_are_refused_on_the_others_too(monkeypatch):
    opened, failed = refusals(monkeypatch, Numbers, lambda: 1 / 0)
    assert failed == "ZeroDivisionError: division by zero"
    assert opened.startswith("data: rank 1 cannot open it: ZeroDivisionError: division by zero; all ranks must")
    messages = refusals(monkeypatch, lambda: Numbers(1, "error"), Numbers)
    assert len({*messages}) == 1
    assert "rank 0 cannot read batch 1, which another rank can: OSError: gone" in messages[0]


def test_an_error_on_all_ranks_is_reported_where_it_belongs(monkeypatch):
    assert refusals(monkeypatch, *[lambda: Numbers(1, "error")] * 2) == ["", ""]
    failed = refusals(monkeypatch, *[lambda: 1 / 0] * 2)
    assert failed == ["ZeroDivisionError: division by zero"] * 2


def test_only_a_few_rows_are_read_and_in_one_process_nothing(monkeypatch):
    data = Rows()
    refusals(monkeypatch, lambda: data, lambda: data)
    assert {rows.stop for rows in data.read if isinstance(rows, slice)} == {ROWS}
    alone = Numbers()
    assert on_all_ranks(Ranks(), lambda: alone, 16) == (alone, None)
    assert alone.read == []


def test_how_a_batch_is_augmented_counts_among_its_inputs():
    batch = Numbers().batch(0, 4, "train")
    drawn = [Transform(lambda inputs, each: inputs, torch.full((4,), number)) for number in (0, 0, 1)]
    batches = [replace(batch, transform=each) for each in drawn]
    hashes = [same_data.batch_of(SimpleNamespace(batch=lambda *_, each=each: each), 0, 4) for each in batches]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0]["targets"] == hashes[2]["targets"]
