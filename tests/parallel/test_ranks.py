"""Which rank this is, what ranks tell each other, how long they wait for that, and how one ends: with its own code."""

import os
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import (
    Ranks,
    all_gather_object,
    bind_to_card,
    broadcast_object,
    connection_error,
    current_ranks,
    host_group,
    join_process_group,
    run_on_main,
    set_timeout,
    timeout,
)
from tests.parallel.launches import finish, on_demand, start
from tests.runs import ROOT, TINY_GPT

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE")


def test_a_rank_is_the_one_that_torchrun_says(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert current_ranks() == Ranks(0, 1, 0, launched=False, restarts=0)
    for name, value in zip(TORCHRUN, (5, 8, 1, 2, 4), strict=True):
        monkeypatch.setenv(name, str(value))
    assert current_ranks() == Ranks(5, 8, 1, launched=True, restarts=2, local_world_size=4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert current_ranks().local_world_size == 2, "at least this one and those before it"


@pytest.mark.parametrize(("cards", "backend"), [(0, "gloo"), (4, "cpu:gloo,cuda:nccl")])
def test_joining_connects_cards_too_but_does_not_start_cuda(monkeypatch, cards, backend):
    joined = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("CUDA has started"))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: joined.append(backend))
    join_process_group(Ranks(5, 16, 5, launched=True, local_world_size=8))
    assert joined == [backend]


def test_no_rank_goes_on_before_all_have_connected(monkeypatch):
    """A rank that refuses the configuration leaves at once, and must not cut the connections of the others."""
    seen = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: seen.append(os.environ["TORCH_DIST_INIT_BARRIER"])
    )
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    join_process_group(Ranks(0, 2, launched=True))
    assert seen == ["1"]
    assert "TORCH_DIST_INIT_BARRIER" not in os.environ
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "0")
    join_process_group(Ranks(0, 2, launched=True))
    assert seen == ["1", "0"]


class Nccl:
    """The backend of the cards, which connects them when told the device."""

    supports_splitting = True
    bound_device_id = None
    connected = ()

    def eager_connect_single_device(self, device):
        """Notes the device."""
        assert self.bound_device_id == device
        self.connected = (*self.connected, device)


class World:
    """The default process group, of gloo and NCCL."""

    bound_device_id = None

    def __init__(self):
        self.backend = Nccl()

    def _get_backend(self, device):
        assert device.type == "cuda"
        return self.backend


def test_nccl_is_told_the_card_of_this_rank(monkeypatch):
    world, card = World(), torch.device("cuda", 3)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    bind_to_card(card)
    assert world.bound_device_id is None, "not joined: one process"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    bind_to_card(torch.device("cpu"))
    assert world.bound_device_id is None, "gloo needs none"
    bind_to_card(card)
    assert (world.bound_device_id, world.backend.bound_device_id, world.backend.connected) == (card, card, (card,))


def test_nccl_is_told_the_card_where_python_cannot_bind_a_backend(monkeypatch):
    world, card, connected = World(), torch.device("cuda", 3), []
    world.backend = SimpleNamespace(supports_splitting=True, eager_connect_single_device=connected.append)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    bind_to_card(card)
    assert (world.bound_device_id, connected, vars(world.backend).get("bound_device_id")) == (card, [card], None)


def test_the_interface_that_binds_is_there_in_this_version(group_of_one):
    group = torch.distributed.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert group.bound_device_id is getattr(backend, "bound_device_id", None) is None
    assert isinstance(backend.supports_splitting, bool)
    assert callable(backend.eager_connect_single_device)


def test_the_first_rank_speaks_and_several_are_distributed():
    assert [Ranks(rank, 2).is_main for rank in range(2)] == [True, False]
    assert [Ranks(0, count).distributed for count in (1, 2)] == [False, True]


class DistBackendError(RuntimeError):
    """As PyTorch names what NCCL raises."""


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534]\n Connection closed by peer [127.0.0.1]:1"), True),
        (DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("gloo: tensors have other sizes"), False),
        (RuntimeError("Connection closed by peer, says my own server"), False),
        (OSError("gloo: Broken pipe"), False),
    ],
    ids=["gloo", "nccl", "another error of gloo", "another connection", "no RuntimeError"],
)
def test_a_lost_connection_between_ranks_is_told_from_any_other_error(error, heard):
    expected = " ".join(str(error).split())[:160] if heard else ""
    assert connection_error(error) == expected


def test_one_process_does_what_only_the_first_rank_may_do_itself():
    assert run_on_main(Ranks(), lambda: 3) == 3
    with pytest.raises(ValueError, match="as it is"):
        run_on_main(Ranks(), lambda: int("as it is"))


def test_what_the_first_rank_has_or_refuses_is_so_on_every_rank(group_of_one):
    first, second = Ranks(0, 2, launched=True), Ranks(1, 2, 1, launched=True)

    def refused():
        raise ConfigError("the folder is taken")

    assert run_on_main(first, lambda: {"a": [1]}) == {"a": [1]}
    with pytest.raises(ConfigError, match="the folder is taken"):
        run_on_main(first, refused)
    with pytest.raises(ConfigError, match="the folder is taken"):
        run_on_main(first, refused, otherwise=lambda: None)
    assert run_on_main(first, lambda: "its own", otherwise=lambda: "another's") == "its own"
    assert run_on_main(second, refused, otherwise=lambda: "another's") == "another's", "which does nothing of its own"


def test_values_are_sent_as_they_are(group_of_one):
    value = {"a": [1, None, "x"]}
    assert broadcast_object(value) == value
    assert all_gather_object(value) == [value]


def limits():
    """Returns how long this rank waits in each of its groups, and at their store."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    backends = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
    return [backend.options._timeout for backend in backends], c10d._get_default_store().timeout


def test_how_long_a_rank_waits_is_set_for_every_group_also_for_later_ones(group_of_one):
    import torch.distributed as dist

    dist.new_group(backend="gloo")
    before, after = timeout(), timedelta(seconds=7)
    set_timeout(7)
    host_group()
    assert limits() == ([after] * 3, after)
    set_timeout(before.total_seconds())
    assert limits() == ([before] * 3, before)


WAITING = [*TINY_GPT, "steps=4", "forensics=off", "monitors=none", "checkpoint=off"]
LATE = {
    "in the first step, which may take long": ("First", 60, 4),
    "in the first step": ("First", 4, 60),
    "in the third step": ("Third", 60, 4),
}
"""In which step rank 1 is eight seconds late, `parallel.start_timeout` and `parallel.timeout`."""

CASES = {
    f"{kind} {name}": {
        "overrides": [
            *(*WAITING, f"parallel={kind}", f"model._target_=tests.parallel.given.LateIn{step}Step"),
            *(f"parallel.start_timeout={start}", f"parallel.timeout={later}"),
        ]
    }
    for kind in ("ddp", "fsdp")
    for name, (step, start, later) in LATE.items()
    if (kind == "fsdp") == (name == "in the first step")
}
"""A limit is set for every group of a rank, whatever a kind of parallelism uses it for."""
TOGETHER = [[name for name in CASES if name.startswith("ddp")]]
"""In one launch: only the last of these runs loses a rank."""


@pytest.fixture(scope="module")
def seen(shared_place):
    """What each rank saw."""
    return on_demand(shared_place / "late", 2, CASES, TOGETHER)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_first_step_and_the_later_ones_have_time_limits_of_their_own(seen, shared_place, name):
    first = seen[0][name]
    if "may" in name:
        assert (first["error"], len(first["readings"])) == (None, 4)
        return
    assert first["error"] == "RankLost"
    assert "; this rank has waited for 4 s: if the ranks need longer, raise parallel.timeout" in first["message"]
    where = first["message"].rpartition("is not done yet; ")[2]
    call = "all_reduce" if "ddp" in name else "all_gather of blocks.0"  # rank 1 is late within the model's forward pass
    # On a busy machine rank 1 may write its record after the others have stopped waiting for it.
    other = r"rank 1 (came \d+ s later|has left no record)"
    told = re.fullmatch(rf"rank 0 wait(ed|s) in {call}.* .collective \d+.; {other}", where)
    # the others, in versions of PyTorch that do not record what gloo does
    assert told or (where == first["message"] and not recorded(shared_place / "late" / name)), first["message"]


def recorded(folder):
    """Returns the records that the ranks of a run have left."""
    return sorted(file.name for file in folder.glob("collectives/*"))


DISTURBED = """
import atexit, runpy, sys, threading, time, torch

def work():
    threading.main_thread().join()  # at the end of the process: until then, they would only take its time
    a = torch.ones(100)
    while True:
        a + a  # needs the interpreter again after each sum, as a thread of gloo's does that lets a tensor go

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
threading.Thread(target=lambda: (threading.main_thread().join(), time.sleep(0.5), print("waited for"))).start()
atexit.register(print, "registered")
sys.stdout.reconfigure(line_buffering=False, write_through=False)  # torchrun starts ranks with `python -u`
"""
RUN = [*TINY_GPT, "steps=2", "forensics=off", "monitors=none", "checkpoint=off", "parallel=ddp"]
OVERRIDES = {
    0: [],
    2: ["steps=-1"],
    3: ["guard=skip", "faults=gradient", "faults.at=[1,2]", "guard.max_consecutive=1"],
}
"""What a run is told, by the code that it ends with."""


def ended(tmp_path, ending, *arguments):
    """torchrun with one rank, which threads of its own disturb, to its end."""
    script = tmp_path / "disturbed.py"
    script.write_text(f"{DISTURBED}sys.argv[0] = {str(ROOT / 'train.py')!r}\n{ending}\n")
    return finish(start(1, str(script), *arguments, cwd=tmp_path, forks=False))  # a fork ends in its own way


@pytest.mark.beside(when=lambda code: code == 3)
@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_rank_ends_with_its_code_whatever_its_threads_do(tmp_path, code):
    done = ended(tmp_path, "runpy.run_path(sys.argv[0], run_name='__main__')", *RUN, *OVERRIDES[code])
    assert done.stdout.endswith("waited for\nregistered\n"), done.stdout + done.stderr
    assert done.returncode == (code > 0)
    assert code == 0 or f"exitcode  : {code} " in done.stderr, done.stderr


@pytest.mark.slow
def test_pythons_own_end_does_not_survive_such_threads(tmp_path):
    """What the test above guards against: a race, so five tries. If none aborts, drop `exit_process`."""
    assert any("exitcode  : -6 " in ended(tmp_path, "sys.exit(0)").stderr for _ in range(5))
