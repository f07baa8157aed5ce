"""Mooncake's name for :mod:`uccl.p2p`: programs that import ``mooncake.engine`` run unchanged.

It is a distribution of its own, so that no user gets this name unasked. There is the transfer engine
and nothing else: no store (``mooncake.store``), no collectives (``mooncake.pg``), no expert
parallelism (``mooncake.mooncake_ep_buffer``).
"""
