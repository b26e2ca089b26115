"""Which network interface the ranks of several machines use for gloo.

By default, gloo takes the address of the machine's own name. On many clusters that is 127.0.1.1, or an address in a
network for management. The ranks have met at `MASTER_ADDR`, so the interface towards it connects them.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the interface that gloo uses."""

GET_ADDRESS = 0x8915
"""`SIOCGIFADDR` of Linux: asks for an interface's IPv4 address."""


def choose_interface() -> None:
    """Sets the interface that gloo uses in this process, unless the user has set it or it is not known."""
    if INTERFACE_VARIABLE not in os.environ and (found := interface(os.environ)):
        os.environ[INTERFACE_VARIABLE] = found


def interface(environment: Mapping[str, str]) -> str:
    """Returns the name of the interface towards `MASTER_ADDR`; empty if it is not known.

    On the machine that has this address, its name may mean 127.0.1.1. Then another node of the Slurm job decides.
    """
    nodes = environment.get("STABLETRAIN_NODE_ADDRESSES", "").split(",")
    own = map(own_address, filter(None, [environment.get("MASTER_ADDR", ""), *nodes]))
    outside = next((address for address in own if address and not address.startswith("127.")), "")
    return addresses().get(outside, "")


def own_address(host: str) -> str:
    """Returns the IPv4 address from which this machine sends to a host; empty if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket, this only chooses the route
        except OSError:
            return ""
        return probe.getsockname()[0]


def addresses() -> dict[str, str]:
    """Returns the name of each interface that has an IPv4 address, by that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
