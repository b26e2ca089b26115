"""The ranks of a user's loop: the numbers of a step are those of all ranks, and the model is found in its wrappers."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stabletrain.errors import ConfigError
from stabletrain.parallel import distributed
from stabletrain.parallel.loop import LoopRanks, innermost, ranks_of_loop, wrappers
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import GradNorms, LossTerms, OwnNumbers, RankPart, StepChecks


def norms_of(gradients, sharded=()):
    """The norms of one rank's gradients."""
    each = torch.stack([gradient.norm() for gradient in gradients])
    return GradNorms(torch.linalg.vector_norm(each), each, sharded)


@pytest.fixture
def reduced(monkeypatch):
    """Returns what every rank gets for the step, given the numbers of each."""

    def reduce(*parts):
        ranks = [LoopRanks(Ranks(rank, len(parts), launched=True)) for rank in range(len(parts))]
        rows = []
        monkeypatch.setattr(distributed, "all_gather_tensor", lambda gathered, row: rows.append(row))
        for each, part in zip(ranks, parts, strict=True):
            each.reduce_stats(*part)
        monkeypatch.setattr(distributed, "all_gather_tensor", lambda gathered, row: gathered.copy_(torch.cat(rows)))
        return [each.reduce_stats(*part) for each, part in zip(ranks, parts, strict=True)]

    return reduce


def part(loss, norms, buffers=0.0, changed=0.0, unproven=0.0):
    checks = StepChecks(0.0, 0.0, buffers, changed, unproven=unproven)
    return LossTerms(torch.tensor(loss)), norms, checks


def test_the_loss_is_the_mean_over_the_ranks_and_every_rank_gets_the_same(reduced):
    norms = norms_of([torch.tensor([3.0, 4.0])])
    found = reduced(
        part(1.0, norms, torch.tensor(2.0)), part(2.0, norms, torch.tensor(7.0), unproven=1.0), part(6.0, norms)
    )
    for terms, total, checks in found:
        assert terms == LossTerms(torch.tensor(3.0))
        assert total.total == 5
        assert (checks.buffers, checks.state_changed, checks.unproven, checks.rank) == (7, 0, 1, -1)
        assert not checks.stop
    assert [checks.own.loss for _, _, checks in found] == [1, 2, 6], "and remembers its own loss"


def test_shards_add_up_and_whole_gradients_count_once(reduced):
    torch.manual_seed(0)
    one, other, whole = torch.randn(5), torch.randn(4), torch.randn(3)
    found = reduced(
        part(1.0, norms_of([one, whole], [True, False])), part(1.0, norms_of([other, whole], [True, False]))
    )
    for _, norms, _ in found:
        assert torch.allclose(norms.total, torch.cat([one, other, whole]).norm())
    assert torch.equal(found[0][1].total, found[1][1].total)
    assert found[0][1].each.tolist() == [one.norm(), whole.norm()]


def test_shards_of_two_copies_count_once(reduced):
    torch.manual_seed(0)
    one, other, whole = torch.randn(5), torch.randn(4), torch.randn(3)
    here, there = (norms_of([each, whole], sharded=[0.5, 0]) for each in (one, other))
    found = reduced(*(part(1.0, norms) for norms in (here, there, here, there)))
    expected = torch.cat([one, other, whole]).norm()
    assert [norms.total.item() for _, norms, _ in found] == [pytest.approx(expected.item())] * 4


@pytest.mark.parametrize("sharded", [(), (True,)])
def test_what_is_not_finite_on_one_rank_is_so_for_all(reduced, sharded):
    good, bad = (norms_of([torch.tensor([value])], sharded) for value in (1.0, math.nan))
    assert all(norms.total.isnan() for _, norms, _ in reduced(part(1.0, good), part(1.0, bad)))


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"loss": 1.0, "changed": 1.0}])
def test_the_first_rank_at_fault_is_named(reduced, bad):
    norms = norms_of([torch.ones(1)])
    found = reduced(part(1.0, norms), part(norms=norms, **bad), part(norms=norms, **bad))
    assert [checks.rank for _, _, checks in found] == [1, 1, 1]


def test_a_ranks_own_part_is_its_loss():
    ranks = LoopRanks(Ranks(1, 2, launched=True))
    own = OwnNumbers(torch.tensor(2.0), torch.tensor(3.0))
    assert ranks.rank_part(own, 1.0, 1.0) == RankPart(1, 2.0)


def test_a_loop_without_other_ranks_is_a_single_process(group_of_one):
    assert type(ranks_of_loop()) is SingleProcess


def test_the_users_own_module_is_found_in_its_wrappers(group_of_one):
    model = nn.Linear(2, 2)
    averaged = DistributedDataParallel(model)
    assert innermost(model) is innermost(torch.compile(averaged)) is innermost(averaged) is model
    assert wrappers(torch.compile(averaged)) == wrappers(averaged) == [averaged]
    assert wrappers(nn.ModuleList([model, averaged])) == [averaged]
    assert wrappers(model) == []


def test_the_older_fsdp_is_refused():
    kind = type("FullyShardedDataParallel", (nn.Sequential,), {})
    with pytest.raises(ConfigError, match="use fully_shard"):
        innermost(nn.Sequential(kind(nn.Linear(1, 1))))
