"""Two processes, one NIXL agent in each, and the backend UCCL between them: a write, a read, and notifications.

    pip install nixl numpy, and this project
    python examples/python/nixl_read_write.py

NIXL 1.0 also imports PyTorch; later releases do without.
"""

import os
import time
from multiprocessing import Pipe, Process

import numpy as np
import uccl

# The folder where NIXL looks for backends: its own plugins and this project's. It must be set
# before the first agent is made; in a shell, export NIXL_PLUGIN_DIR=$(python -m uccl.nixl) does the
# same.
os.environ.setdefault("NIXL_PLUGIN_DIR", uccl.nixl_plugin_dir())

from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402

SIZE = 1 << 20


def make_agent(name):
    """Makes an agent with one backend. Two agents can use the backends that both have."""
    return nixl_agent(name, nixl_agent_config(backends=["UCCL"]))


def register(agent, array):
    """Lets the agent's peers reach the array: address, length, device (0 for host memory), and a name for it."""
    return agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")


def transfer(agent, op, mine, theirs, peer, notification=b""):
    """Runs one transfer to its end. A real program would do something else while it is under way."""
    local = agent.get_xfer_descs([mine], "DRAM")
    remote = agent.get_xfer_descs([theirs], "DRAM")
    handle = agent.initialize_xfer(op, local, remote, peer, notification)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise SystemExit(f"the {op} ended as {state}")


def wait_for_notification(agent, peer, wanted):
    """Returns once the peer's notification is there: its transfer's data is there, too."""
    end = time.monotonic() + 30
    while not agent.check_remote_xfer_done(peer, wanted):
        if time.monotonic() > end:
            raise SystemExit(f"{peer} never said {wanted}")


def target(pipe):
    """Offers memory and waits: the initiator moves the data, both ways."""
    agent = make_agent("target")
    memory = np.zeros(SIZE, np.uint8)
    register(agent, memory)
    # Metadata has the agent's address and its registered memory. The program carries it to the
    # other side, here through a pipe.
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    agent.add_remote_agent(pipe.recv())

    wait_for_notification(agent, "initiator", b"written")
    print("target: the first byte is now", memory[0])
    memory += 1
    # A notification that belongs to no transfer.
    agent.send_notif("initiator", b"changed")
    wait_for_notification(agent, "initiator", b"bye")


def initiator(pipe):
    """Writes to the target's memory, and reads it after the target has changed it."""
    agent = make_agent("initiator")
    memory = np.full(SIZE, 7, np.uint8)
    registered = register(agent, memory)
    metadata, address = pipe.recv()
    agent.add_remote_agent(metadata)
    peer = "target"
    pipe.send(agent.get_agent_metadata())

    mine, theirs = (memory.ctypes.data, SIZE, 0), (address, SIZE, 0)
    transfer(agent, "WRITE", mine, theirs, peer, b"written")
    wait_for_notification(agent, peer, b"changed")
    transfer(agent, "READ", mine, theirs, peer)
    print("initiator: all bytes are now 8:", bool((memory == 8).all()))
    agent.send_notif(peer, b"bye")

    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


def run(side, pipe):
    side(pipe)
    print(end="", flush=True)
    # Libraries of NIXL's wheel crash when they are unloaded, so the process exits without that.
    os._exit(0)


if __name__ == "__main__":
    ends = Pipe()
    processes = [Process(target=run, args=pair) for pair in zip((target, initiator), ends)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(any(process.exitcode for process in processes))
