"""The port that the ranks of an actor group meet at."""

from __future__ import annotations

import random
import socket
from pathlib import Path

KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20000  # Ray's workers listen below


def quiet_ports() -> list[int]:
    """Ports from 20000 up that the kernel does not give to connections and to sockets that ask for any port.

    Where it may give all of them, all of them: no better than upstream's choice, but no worse.
    """
    first, last = (int(word) for word in KERNEL_RANGE.read_text().split()) if KERNEL_RANGE.exists() else (32768, 60999)
    ports = range(LOWEST, 65536)
    return [port for port in ports if not first <= port <= last] or list(ports)


def free_port() -> int:
    """A port, drawn from `quiet_ports`, that nobody listens on. OSError if there is none."""
    ports = quiet_ports()
    random.SystemRandom().shuffle(ports)  # not the seeded generator: runs with one seed would meet at one port
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port: tried {len(ports)}")


class QuietPort:
    """Mixed into an OpenRLHF actor: its group's port cannot be lost before the group listens on it.

    Upstream lets the kernel choose, and listens seconds later, when the models' engines have opened hundreds of
    connections: now and then one of them has got the port ("address already in use").
    """

    @staticmethod
    def _get_free_port() -> int:
        return free_port()
