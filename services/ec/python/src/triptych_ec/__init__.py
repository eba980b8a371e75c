"""Triptych's encoder-cache (EC) objects and stores in Python, and an EC connector for vLLM.

Read in this order: `errors`, `limits`, `keys`, `extents`, `items`, `objects` (the bytes of an encoder output), `stores`
(where they lie), `metrics`, `settings`, and `vllm_connector`, the only module that imports vLLM and torch. The formats
are those of the Rust crate `triptych-ec`; the tests hold each against the other.
"""

from .errors import EcError, ObjectError, SettingError, StoreUnavailable, TooLarge
from .items import EncodedItem
from .keys import content_key, fingerprint, proxy_identifier, proxy_key
from .objects import MacKeys, decode, encode, parse_head
from .stores import Store, open_store

__all__ = [
    "EcError",
    "EncodedItem",
    "MacKeys",
    "ObjectError",
    "SettingError",
    "Store",
    "StoreUnavailable",
    "TooLarge",
    "content_key",
    "decode",
    "encode",
    "fingerprint",
    "open_store",
    "parse_head",
    "proxy_identifier",
    "proxy_key",
]
