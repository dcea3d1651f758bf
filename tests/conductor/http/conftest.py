"""Fixtures of others that these tests use."""

from tests.node.conftest import many_descriptors

__all__ = ["many_descriptors"]
