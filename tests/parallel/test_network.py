"""Which network interface gloo uses: the one towards the other machines."""

import os
import socket

import pytest
import torch

from stabletrain.parallel import ranks
from stabletrain.parallel.ranks import INTERFACE_VARIABLE, Ranks, addresses, interface, join_process_group, own_address

ROUTES = {"node0": "10.0.0.7", "node1": "10.0.0.7", "10.1.0.5": "10.1.0.7", "me": "127.0.1.1", "nowhere": ""}
NAMES = {"127.0.0.1": "lo", "192.168.0.7": "management", "10.0.0.7": "ib0", "10.1.0.7": "eth1"}


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """A machine with several networks, in place of this one; `MASTER_ADDR` is its first node."""
    monkeypatch.setattr(ranks, "own_address", ROUTES.get)
    monkeypatch.setattr(ranks, "addresses", lambda: NAMES)
    for name in (INTERFACE_VARIABLE, "STABLETRAIN_NODE_ADDRESSES"):
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)


def chosen(ranks):
    """The variable after a rank has joined."""
    join_process_group(ranks)
    return os.environ.get(INTERFACE_VARIABLE)


TWO_MACHINES = Ranks(9, 16, 1, launched=True, local_world_size=8)


def test_gloo_uses_the_interface_towards_the_first_machine():
    assert chosen(TWO_MACHINES) == "ib0"


def test_ranks_of_one_machine_are_left_alone():
    assert chosen(Ranks(1, 8, 1, launched=True, local_world_size=8)) is None


def test_the_users_interface_is_kept(monkeypatch):
    monkeypatch.setenv(ranks.INTERFACE_VARIABLE, "eth9")
    assert chosen(TWO_MACHINES) == "eth9"


@pytest.mark.parametrize(
    ("master", "nodes", "name"),
    [
        ("10.1.0.5", "", "eth1"),
        ("me", "me,node1", "ib0"),
        ("me", "", ""),
        ("nowhere", "", ""),
        ("", "", ""),
    ],
    ids=["address", "own name is 127.0.1.1", "only that", "unknown host", "no host"],
)
def test_an_address_of_the_machine_itself_does_not_count(master, nodes, name):
    assert interface({"MASTER_ADDR": master, "STABLETRAIN_NODE_ADDRESSES": nodes}) == name


def test_this_machine_has_its_interfaces():
    assert addresses()["127.0.0.1"] in [name for _, name in socket.if_nameindex()]
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("::1") == "", "it has no IPv4 address"
    for address in addresses():
        assert own_address(address) == address
