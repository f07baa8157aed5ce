"""The tuning of normal mode, and the sizes of buffers that follow from it."""

from __future__ import annotations

from uccl import _core
from uccl.ep._checks import check_count
from uccl.ep._formats import GROUP
from uccl.ep._tensors import align

#: The most choices of a token that size hints have room for.
MAX_TOP_K = 32
#: Experts of a rank that size hints have room for.
LOCAL_EXPERTS = 256
#: Ranks of a node in DeepEP's first interface.
RANKS_OF_NODE = 8


class Config:
    """Tuning of normal mode in DeepEP.

    Here only its size hints have a meaning, and ``num_sms`` on GPUs.

    Args:
        num_sms: The most blocks of a launch on a GPU.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens,
            num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: Only recorded.

    Raises:
        ValueError: If ``num_max_nvl_chunked_send_tokens`` is not less than
            ``num_max_nvl_chunked_recv_tokens``, as in DeepEP.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        if num_max_nvl_chunked_send_tokens >= num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens ({num_max_nvl_chunked_send_tokens}) is less than "
                f"num_max_nvl_chunked_recv_tokens ({num_max_nvl_chunked_recv_tokens})"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Computes the size of a buffer for normal mode.

        It holds two calls, each with ``UCCL_EP_TOKENS_AT_ONCE`` tokens of each rank, or 2048. On
        GPUs one call may use all of it: then each rank may have twice as many tokens. More go in
        rounds.

        Args:
            hidden_bytes: Bytes of a row.
            num_ranks: Ranks of the group.

        Returns:
            Bytes, a multiple of 256.

        Raises:
            ValueError: For a negative number, or if ``UCCL_EP_TOKENS_AT_ONCE`` is no number above
                0.
        """
        check_count("hidden_bytes", hidden_bytes)
        check_count("num_ranks", num_ranks)
        return self._two_calls(hidden_bytes, _core.EpNodes(1, num_ranks))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Computes the bytes that relays need in addition, where ranks are on several nodes of
        eight, as DeepEP counts them.

        Args:
            hidden_bytes: Bytes of a row.
            num_ranks: Ranks of the group.

        Returns:
            Bytes; 0 if the ranks are on one node, or not on whole nodes of eight.

        Raises:
            ValueError: For a negative number, or if ``UCCL_EP_TOKENS_AT_ONCE`` is no number above
                0.
        """
        check_count("hidden_bytes", hidden_bytes)
        check_count("num_ranks", num_ranks)
        nodes, rest = divmod(num_ranks, RANKS_OF_NODE)
        if rest or nodes < 2:
            return 0
        relayed = self._two_calls(hidden_bytes, _core.EpNodes(nodes, RANKS_OF_NODE))
        return relayed - self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)

    @staticmethod
    def _two_calls(hidden_bytes: int, nodes: _core.EpNodes) -> int:
        length = _core.ep_dispatch_len(
            payload=hidden_bytes,
            scales=GROUP,
            top_k=MAX_TOP_K,
            local_experts=LOCAL_EXPERTS,
            slots=tokens_at_once(),
            nodes=nodes,
        )
        return 2 * align(length, 128)


def tokens_at_once() -> int:
    """Tokens of each rank that size hints have room for: the environment's number, or 2048."""
    return _core.ep_settings().tokens_at_once
