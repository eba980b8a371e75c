"""Errors of the package. Each class is something that a caller can act on."""

from __future__ import annotations


class EcError(Exception):
    """Base of all errors of this package."""


class SettingError(EcError):
    """A setting that cannot be used. The text says what is allowed and shows no password."""


class StoreUnavailable(EcError):
    """A store that did not answer within its deadline, or answered with an error. A retry may succeed."""

    def __init__(self, store: str, op: str, reason: object) -> None:
        super().__init__(f"{store}: {op}: {reason}")
        self.store = store
        self.op = op


class TooLarge(EcError):
    """An object over the limit."""

    def __init__(self, limit: int, actual: int) -> None:
        super().__init__(f"object of {actual} bytes is over the limit of {limit}")
        self.limit = limit
        self.actual = actual


class ObjectError(EcError):
    """Bytes that are not the expected object. In every case it is quarantined and encoded again."""
