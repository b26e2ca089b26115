"""A guard builds its policy from its options, and never changes a policy that the user gave."""

import math

import numpy as np
import pytest

from stabletrain.errors import ConfigError
from stabletrain.guard.options import check_numbers, make_policy
from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard
from tests.guard.given import Loop, batches
from tests.guard.test_step_numbers import spoilt


@pytest.mark.parametrize("make", [SkipGuard, RollbackGuard])
def test_the_users_own_policy_never_changes(tmp_path, make):
    policy, untouched = make(sigma=5.0), make(sigma=5.0)
    loop = Loop(tmp_path, policy=policy, checksum_every=1, recheck_every=2, check_update=False, max_incidents=0)
    loop.run([*batches(3), spoilt(batches(1)[0]), *batches(3)])
    assert loop.guard.skipped == 1
    assert type(policy.recheck) is type(untouched.recheck)
    assert str(policy.state_dict()) == str(untouched.state_dict())
    assert policy.state_check.every == untouched.state_check.every
    assert type(policy.update_check) is type(untouched.update_check)


def test_two_guards_with_one_policy_count_apart(tmp_path):
    policy = SkipGuard(max_consecutive=9)
    first, second = (Loop(tmp_path / name, policy=policy, max_incidents=0) for name in ("a", "b"))
    first.run([spoilt(batches(1)[0])])
    assert (first.guard.skipped, second.guard.skipped) == (1, 0)


def test_the_policy_of_the_options_has_the_users_limits():
    chosen = make_policy(SkipGuard(sigma=2.5), checksum_every=4, check_update=False)
    assert (chosen.sigma, chosen.state_check.every) == (2.5, 4)
    assert type(chosen.update_check) is type(NoGuard().update_check)
    assert isinstance(make_policy(rollback=True), RollbackGuard)


@pytest.mark.parametrize("value", [0, 2.5, None, np.float32(1.0), np.int64(3)])
def test_any_kind_of_number_is_taken(value):
    check_numbers(max_norm=value)


@pytest.mark.parametrize("value", [-1, math.nan, True, "1", [1.0]])
def test_what_is_no_number_of_at_least_0_is_refused(value):
    with pytest.raises(ConfigError, match=r"Guard\(max_norm=.*1.0 is usual, 0 clips nothing"):
        check_numbers(max_norm=value)


@pytest.mark.parametrize("name", ["checksum_every", "recheck_every"])
def test_a_negative_interval_is_refused(name):
    with pytest.raises(ConfigError, match=rf"Guard\({name}=-1\) is below 0"):
        make_policy(**{name: -1})


def test_a_high_loss_alone_is_no_spike_in_a_users_loop_and_the_users_own_policy_never_knows():
    mine = SkipGuard()
    assert (make_policy(mine).lone_loss_is_spike, mine.lone_loss_is_spike) == (False, True)
