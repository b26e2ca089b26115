"""Who is named if ranks get different bits from one micro-batch, and when they are not compared."""

from dataclasses import replace

import pytest
import torch

from stabletrain.guard.checks.neighbours import UNLIKE, Setting, Shift, Table, blame, why_unlike
from stabletrain.machine.determinism import Generators
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch

CPU = torch.device("cpu")


def table(ranks, differing, repeated=True):
    """Rank k computes other bits than rank k + 1 for each k of `differing`."""
    own = torch.arange(ranks)[:, None].expand(ranks, 2).clone()
    others = own.roll(-1, 0).clone()
    others[differing, 1] += 1000
    return Table(["loss", "weight"], torch.stack([own, others], dim=1), repeated)


@pytest.mark.parametrize(
    ("ranks", "differing", "suspects"),
    [
        (4, [1, 2], [2]),
        (4, [0, 3], [0]),
        (3, [0, 1], [1]),
        (3, [2, 0], [0]),
        (4, [1], [1]),
        (2, [1], [1]),
        (2, [0, 1], [0, 1]),
        (4, [0, 2], [0, 1, 2, 3]),
        (5, [0, 1, 2], [0, 1, 2, 3]),
    ],
)
def test_the_rank_that_all_differing_pairs_have_in_common_is_named(ranks, differing, suspects):
    found = blame(table(ranks, differing))
    assert found is not None
    assert [*found.suspects] == suspects
    assert [*found.pairs] == [(rank, (rank + 1) % ranks) for rank in sorted(differing)]
    assert found.names == ["weight"]


def test_without_a_repetition_both_ranks_of_a_single_pair_are_suspects():
    found = blame(table(4, [3], repeated=False))
    assert found is not None
    assert [*found.suspects] == [0, 3]


def test_equal_bits_blame_nobody():
    assert blame(table(4, [])) is None


def test_ranks_are_compared_only_where_bits_can_be_equal():
    setting = Setting(True, ("card", "2.11"), "[8, 16]")
    assert why_unlike([setting, setting]) == ""
    for field, other in (("exact", False), ("machine", ("card", "2.12")), ("shapes", "[7, 16]")):
        assert why_unlike([setting, setting._replace(**{field: other})]) == UNLIKE[field]
    assert why_unlike([setting._replace(exact=False)] * 2) == UNLIKE["exact"]


class Two(SingleProcess):
    """Two ranks that have the same micro-batch and differ only in what `other` changes."""

    def __init__(self, other=lambda row: row):
        super().__init__(Ranks(0, 2, 0, launched=True))
        self.other = other

    def gather(self, here):
        setting, generators = here
        return [here, (setting, replace(generators, cpu=generators.cpu.clone().fill_(7)))]

    def all_gather(self, row):
        return torch.stack([row, self.other(row.clone())])


def judged(found, *, due=True, parallel=None, exact=True):
    """The number that judges a comparison in which this rank computes `found`; and what was kept."""
    kept, seen = [], []

    def run(batch, generators):
        seen.append((batch, generators))
        return found

    batch = Batch(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.arange(2), ["a", "b"], 2)
    own = [torch.ones(()), torch.full((2,), 3.0)]
    shift = Shift(parallel or Two(), exact, due, kept.append)
    names = ["loss", "weight"]
    number = shift.judged(torch.tensor(0.5), batch, Generators.now(CPU), run, lambda: own, names, repeated=True)
    return float(number), kept, seen


def test_equal_bits_leave_the_number_and_other_bits_make_it_infinite():
    assert judged([torch.ones(()), torch.full((2,), 3.0)])[0] == 0.5
    assert judged([torch.ones(()), torch.tensor([3.0, 3.0000002])])[0] == float("inf")
    assert judged([torch.ones(()), torch.tensor([3.0, 3.0000002])], due=False)[0] == 0.5, "a rehearsal is not judged"


def test_the_other_micro_batch_runs_with_the_random_states_of_its_rank():
    ((batch, generators),) = judged([torch.ones(()), torch.full((2,), 3.0)])[2]
    assert torch.equal(generators.cpu, torch.full_like(generators.cpu, 7))
    assert (batch.ids, batch.sources, batch.counted) == (None, None, 2)


def test_too_little_memory_on_one_rank_is_known_to_all():
    assert judged(None)[0] == -1.0

    def failed(row):
        row[0] = 1
        return row

    assert judged([torch.ones(()), torch.full((2,), 3.0)], parallel=Two(failed))[0] == -1.0


def test_where_bits_may_differ_nothing_runs():
    number, kept, seen = judged(None, exact=False)
    assert (number, kept, seen) == (0.5, [UNLIKE["exact"]], [])
