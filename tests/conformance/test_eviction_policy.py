"""The policies that ship keep the contract."""

from __future__ import annotations

import pytest

from headwater.core.eviction import LRU, POLICIES, S3FIFO
from headwater.core.learned import Learned
from headwater.core.spread import Copies, SpreadEviction
from headwater.ports import EvictionPolicy
from tests.conformance.eviction_policy import EvictionPolicySuite, name


class TestLRU(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return LRU()


class TestS3FIFO(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return S3FIFO()


class TestS3FIFOWithALargeSmallQueue(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return S3FIFO(small_share=0.6)


class TestLearned(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return Learned()


class TestSpread(EvictionPolicySuite):
    """Around each policy, with every third chunk held elsewhere."""

    @pytest.fixture(autouse=True, params=sorted(POLICIES))
    def around(self, request: pytest.FixtureRequest) -> None:
        self.inner = request.param

    def policy(self) -> EvictionPolicy:
        copies = Copies()
        copies.told({name(entry): 1 for entry in range(0, 300, 3)})
        return SpreadEviction(POLICIES[self.inner](), copies)
