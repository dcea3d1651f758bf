"""The lower tiers that need nothing from outside keep the contract, and so does what they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from headwater.errors import UnavailableError
from headwater.places import parse_remote
from headwater.ports import LowerTier, Piece
from headwater.tiers.memory import MemoryTier
from headwater.tiers.object_store import ObjectStoreTier
from headwater.tiers.remote import open_remote
from headwater.types import Outcome
from tests.conformance.lower_tier import LowerTierSuite, identity, memory_of, soon


class TestMemoryTier(LowerTierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[LowerTier]:
        tier = MemoryTier()
        yield tier
        tier.close()

    def test_what_does_not_fit_is_full(self) -> None:
        tier = MemoryTier(identity(0).length_bytes * 2)
        assert self.write(tier, [identity(number) for number in range(3)]) == [Outcome.DONE] * 2 + [Outcome.FULL]
        tier.delete([identity(0)], soon())
        assert self.write(tier, [identity(2)]) == [Outcome.DONE]

    def test_a_sick_one_refuses_all(self) -> None:
        tier = MemoryTier()
        tier.sick = True
        piece = Piece(identity(0), memory_of(identity(0), 1))
        for call in (
            lambda: tier.holds([identity(0)], soon()),
            lambda: tier.read([piece], soon()),
            lambda: tier.write([piece], soon()),
            lambda: tier.usage(soon()),
        ):
            with pytest.raises(UnavailableError):
                call()
        tier.sick = False
        assert tier.write([piece], soon()) == [Outcome.DONE]


class TestObjectStoreInMemory(LowerTierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[LowerTier]:
        tier = ObjectStoreTier(MemoryStore(), "memory")
        yield tier
        tier.close()


class TestSharedDirectory(LowerTierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[LowerTier]:
        tier = open_remote(parse_remote(f"file://{tmp_path}/kv"))
        yield tier
        tier.close()
