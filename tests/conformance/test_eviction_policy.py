"""The policies that ship keep the contract."""

from __future__ import annotations

from headwater.core.eviction import LRU, S3FIFO
from headwater.ports import EvictionPolicy
from tests.conformance.eviction_policy import EvictionPolicySuite


class TestLRU(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return LRU()


class TestS3FIFO(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return S3FIFO()


class TestS3FIFOWithALargeSmallQueue(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return S3FIFO(small_share=0.6)
