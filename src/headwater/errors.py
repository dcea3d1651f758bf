"""Five exceptions, grouped by who is to blame. Outcomes (a miss, a shorter prefix) are values, not errors."""

from __future__ import annotations


class HeadwaterError(Exception):
    """The common base; never raised itself."""


class ConfigError(HeadwaterError):
    """The operator's input cannot be used: names the field, the value and the remedy."""


class RefusedError(HeadwaterError):
    """The two sides do not fit together: names the field, what was expected, what was given, and the remedy."""

    def __init__(self, field: str, expected: str, given: str, remedy: str) -> None:
        super().__init__(f"{field}: expected {expected}, given {given}; {remedy}")
        self.field, self.expected, self.given, self.remedy = field, expected, given, remedy


class UnavailableError(HeadwaterError):
    """The node is absent, gone or late; the caller goes on without a cache and may try again later."""


class ProtocolError(HeadwaterError):
    """The peer sent something that is not the protocol; the connection cannot be used any further."""


class ResourceError(HeadwaterError):
    """The host cannot give what is needed (memory, descriptors): names the number needed and the remedy."""
