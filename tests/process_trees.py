"""The processes that a process has started, and the sockets on which they listen."""

import ipaddress
import os
import re
import time
from pathlib import Path

LISTENS = "0A"  # include/net/tcp_states.h
UNCONNECTED = "07"  # UDP: anybody may send to such a socket


def children_of(parent: int) -> list[int]:
    """Return the child processes of a process, in the order of their ids."""
    return sorted(_children().get(parent, []))


def _children() -> dict[int, list[int]]:
    """Return the child processes of every process."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        found.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return found


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def family_of(parent: int) -> list[int]:
    """Return all descendants of a process."""
    children, family = _children(), [parent]
    for one in family:
        family += children.get(one, [])
    return family[1:]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_all_end(processes: list[int], within_seconds: float) -> None:
    deadline = time.monotonic() + within_seconds
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, [(one, command_of(one)) for one in left]
        time.sleep(0.05)


def listening_sockets(processes: list[int]) -> set[str]:
    """Return the addresses on which processes listen: IP addresses, and abstract Unix sockets."""
    addresses: dict[str, str] = {}
    inodes: set[str] = set()
    for process in processes:
        try:
            addresses |= _addresses(process)
            links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:  # the process has ended meanwhile
            continue
        inodes |= {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    return {addresses[inode] for inode in inodes if inode in addresses}


def _addresses(process: int) -> dict[str, str]:
    """Return all sockets' addresses by inode, in the network namespace of a process."""
    found = {}
    for name, state in (("tcp", LISTENS), ("udp", UNCONNECTED)):
        for path in {Path(f"/proc/{process}/net/{name}"), Path(f"/proc/{process}/net/{name}6")}:
            if not path.exists():
                continue
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    found[fields[9]] = f"{name} {_readable(fields[1])}"
    for line in Path(f"/proc/{process}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        is_cudas = fields[7:] and fields[7].startswith("@cuda-")  # the driver's socket
        if int(fields[3], 16) & 0x10000 and fields[7:] and fields[7][0] == "@" and not is_cudas:
            found[fields[6]] = f"unix {fields[7]}"
    return found


def _readable(address: str) -> str:
    host, port = address.split(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    return f"{ip} {int(port, 16)}"


def is_open_to_others(socket: str) -> bool:
    """Return whether other machines or users reach a socket; abstract Unix ones have no guard."""
    kind, host = socket.split()[:2]
    if kind == "unix":
        return True
    ip = ipaddress.ip_address(host)
    mapped = getattr(ip, "ipv4_mapped", None)
    return not (mapped or ip).is_loopback
