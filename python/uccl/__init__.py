"""Moves tensors between GPUs and hosts over whatever link joins them.

The point-to-point engine is :mod:`uccl.p2p`.
"""

from __future__ import annotations

from uccl._core import __version__

__all__ = ["__version__"]
