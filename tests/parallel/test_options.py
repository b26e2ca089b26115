"""The options of `parallel`: which kind of training each makes of the ranks that torchrun started."""

import pytest

from stabletrain.parallel import options
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.hsdp import HSDP
from stabletrain.parallel.ranks import Timeouts
from stabletrain.parallel.single import SingleProcess


@pytest.fixture
def ranks(monkeypatch):
    """Sets the variables of torchrun for rank 0 of so many; None for a start without it."""

    def ranks(count):
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if count is not None:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(count))

    return ranks


@pytest.mark.parametrize("count", [None, 1])
def test_auto_is_a_single_process_where_there_is_one(ranks, count):
    ranks(count)
    made = options.auto(False, True, 60, 30)
    assert type(made) is SingleProcess
    assert made.ranks.world_size == 1
    assert made.ranks.launched is (count is not None)


@pytest.mark.parametrize("make", [options.auto, options.ddp])
@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_several_ranks_are_ddp_with_its_flags(ranks, make, flags):
    ranks(2)
    made = make(*flags, 60, 30)
    assert type(made) is DDP
    assert made.timeouts == Timeouts(start=60, steady=30)
    assert (made.find_unused_parameters, made.compare, made.ranks.world_size) == (*flags, 2)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_reshards_as_it_is_told(ranks, reshard):
    ranks(2)
    made = options.fsdp(reshard, 60, 30)
    assert type(made) is FSDP
    assert made.timeouts == Timeouts(start=60, steady=30)
    assert (made.reshard_after_forward, made.ranks.world_size) == (reshard, 2)


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_hsdp_has_the_copies_that_it_is_told(ranks, flags):
    ranks(4)
    made = options.hsdp(2, None, *flags, 60, 30)
    assert type(made) is HSDP
    assert made.timeouts == Timeouts(start=60, steady=30)
    assert (made.reshard_after_forward, made.compare, made.shards) == (*flags, 2)
    assert options.hsdp(None, 4, *flags, 60, 30).shards == 1


def test_one_rank_of_torchrun_may_be_ddp(ranks):
    ranks(1)
    assert type(options.ddp(False, True, 60, 30)) is DDP
