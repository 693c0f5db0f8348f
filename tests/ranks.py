"""Running code of the tests in several ranks on this machine."""

import os
import socket
import sys
import traceback

from unet3d.distributed.commands import import_variables


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_variables(rank, num_ranks, port):
    """Return the environment variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def in_ranks(num_ranks, work):
    """Run work in forks of this process, so that PyTorch is imported only once; return statuses."""
    return ends_of(start_ranks(num_ranks, work))


def start_ranks(num_ranks, work):
    """Start work in forks of this process and return their ids.

    The calling process must be a new one, in which PyTorch has not started threads.
    """
    port, children = free_port(), []
    for rank in range(num_ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            os.environ |= rank_variables(rank, num_ranks, port)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return children


def ends_of(children):
    """Wait for processes and return their statuses."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def environment():
    """Return the environment of a process that calls :func:`in_ranks`, or is a rank itself."""
    return {
        **os.environ,
        **import_variables(),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
