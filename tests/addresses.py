"""A helper process with memory that peers name by its address."""

from __future__ import annotations

from typing import Any

import numpy as np
from peer import HERE, Peer, Side, main


class AddressSide(Side):
    """Memory by name, and calls that take it apart into addresses."""

    def memory(self, name: str, size: int, fill: int = 0) -> int:
        self.arrays[name] = np.full(size, fill, dtype=np.uint8)
        return self.arrays[name].ctypes.data

    def reg_at(self, addr: int, size: int, publish: bool = False) -> int:
        ok, mr = self.ep.reg(addr, size)
        assert ok, self.ep.last_error()
        assert not publish or self.ep.publish(mr), self.ep.last_error()
        return mr

    def fill(self, name: str, fill: int) -> None:
        self.arrays[name][:] = fill

    def bytes_of(self, name: str) -> bytes:
        return self.arrays[name].tobytes()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        """The result of a call of the endpoint, and the reason if it failed."""
        answer = getattr(self.ep, method)(*args, **kwargs)
        failed = answer is False or isinstance(answer, tuple) and answer[0] is False
        return answer, self.ep.last_error() if failed else None

    def finish(self, method: str, *args: Any) -> tuple[bool, bool]:
        """Runs an asynchronous call to its end."""
        ok, transfer = getattr(self.ep, method)(*args)
        assert ok, self.ep.last_error()
        while (state := transfer.poll()) == (True, False):
            pass
        assert transfer.wait(1) == state
        return state


def start(**settings: Any) -> Peer:
    return Peer(script=HERE / "addresses.py", **settings)


if __name__ == "__main__":
    main(AddressSide())
