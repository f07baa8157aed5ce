"""Sizes and configurations, which need no buffer."""

from __future__ import annotations

from uccl.ep import Buffer as EpBuffer
from uccl.ep import Config, EventOverlap

from nixl_ep._engine import Engine


class Sizes:
    """The class's own methods of the buffer."""

    num_sms: int = 20

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns whether FP8 is there: always True."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the most SMs of a high-throughput call without a ``config``. The CPU has none.

        Args:
            new_num_sms: An even number above 0.

        Raises:
            ValueError: For any other number.
        """
        Engine.set_num_sms(new_num_sms)
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Makes an event behind the current stream's work up to now.

        Returns:
            The event; on the CPU one that is over.
        """
        return EpBuffer.capture()

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Computes ``num_rdma_bytes`` for low latency mode: two dispatches and two combines at a
        time, of any top-k.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens of any rank.
            hidden: Values of a row.
            num_ranks: The most ranks.
            num_experts: The experts of that many ranks.

        Returns:
            Bytes, a multiple of 128.

        Raises:
            ValueError: For a negative number, or no ranks.
        """
        return EpBuffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    #: The name of earlier releases.
    get_rdma_size_hint = get_low_latency_buffer_size_hint

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for ``ht_dispatch``: the same for any ``num_ranks``, with the
        class's number of SMs."""
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Returns a configuration for ``ht_combine``: the same for any ``num_ranks``, with the
        class's number of SMs."""
        return Config(cls.num_sms)
