"""Stores of EC objects, with the settings of the Rust side: `disk:DIR`, `redis://…`, `rediss://…`, `grpc://host:port`."""

from .base import Held, Lease, Store
from .opening import open_store

__all__ = ["Held", "Lease", "Store", "open_store"]
