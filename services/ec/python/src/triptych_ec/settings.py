"""Settings of the connector: `ec_connector_extra_config` of vLLM, read once and checked, every mistake at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import SettingError
from .limits import KEY_BYTES
from .objects import MacKeys
from .stores.base import Store
from .stores.opening import is_authority, open_store
from .stores.peers import WithPeers
from .stores.remote import RemoteStore
from .stores.tls import TlsFiles


@dataclass(frozen=True)
class ConnectorSettings:
    """The settings. Times are in seconds, sizes in MiB."""

    store: str
    """The store, as `disk:DIR`, `redis://…` or `grpc://host:port`."""
    peers: tuple[str, ...] = ()
    """`host:port` of workers whose memory is asked for what the store does not have."""
    fingerprint: str = ""
    """Text that names the encoder's weights; empty: they are sampled from the model's files."""
    accept_proxy_keys: bool = False
    """An identifier `triptych-` with 64 hex digits is the content key of an object. Only for instances that none but
    Triptych's proxy reaches: a client could name the object of another."""
    proxy_fingerprints: tuple[str, ...] = ()
    """Fingerprints, in hex, of the encoders whose objects are taken by such a key; empty: any of the right shape."""
    mac_keys_file: str = ""
    """File of the keys that sign objects, as Triptych's `--ec-mac-keys`; empty: the one that `TRIPTYCH_EC_MAC_KEYS`
    names, and without it objects are not signed."""
    tenant_salt_env: str = "TRIPTYCH_EC_TENANT_SALT"
    """Environment variable of the secret under which outputs are shared; where it is not set, all share."""
    tls_ca_file: str = ""
    """CA of the cluster, for TLS to a `grpc://` store and to peers; empty: the file that `TRIPTYCH_TLS_CA` names, and
    without it the connections are plaintext. `TRIPTYCH_TLS_CERT`, `…_KEY` and `…_SERVER_NAME` likewise."""
    tls_cert_file: str = ""
    """Certificate of this process."""
    tls_key_file: str = ""
    """Its private key."""
    tls_server_name: str = ""
    """Name in the certificates of servers; empty: the host that is dialled."""
    timeout_s: float = 5.0
    """Deadline of an operation of the store."""
    patience_s: float = 30.0
    """Time for which a request waits for an item that is not there."""
    lease_ttl_s: float = 30.0
    """Time after which the lease of a dead producer ends."""
    max_object_mib: int = 512
    """Largest object."""
    host_cache_mib: int = 1024
    """Memory for verified objects before the engine has them. One request may exceed it while it is alone."""
    publish_queue_mib: int = 1024
    """Memory for outputs that are not stored yet; an output beyond it is not published."""
    n_threads: int = 8
    """Threads that read the store."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The process's environment, for secrets."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ConnectorSettings:
        """Raises `SettingError` that names every key that is wrong."""
        known = {f.name: f for f in fields(cls) if f.name != "environment"}
        mistakes = [f"`{key}` is no setting; allowed are {', '.join(known)}" for key in extra if key not in known]
        if not isinstance(extra.get("store"), str) or not extra["store"].strip():
            mistakes.append("`store` is missing, as in `disk:/mnt/ec`, `redis://cache` or `grpc://store:7400`")
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name in known:
                wrong = _mistake(name, value, known[name].default)
                mistakes += [wrong] if wrong else []
                values[name] = tuple(value) if isinstance(value, list) else value
        if mistakes:
            raise SettingError("; ".join(mistakes))
        return cls(**values, environment=dict(environment))

    def mac_keys(self) -> MacKeys:
        """The keys of the file. Raises `SettingError` if it cannot be read or has none."""
        path = self.mac_keys_file or self.environment.get("TRIPTYCH_EC_MAC_KEYS", "")
        if not path:
            return MacKeys()
        try:
            keys = MacKeys.parse(Path(path).read_text("ascii", "replace"))
        except OSError as e:
            raise SettingError(f"`mac_keys_file`: {e}") from e
        if not keys.keys:
            raise SettingError(f"`mac_keys_file`: {path} has no key")
        return keys

    def tls(self) -> TlsFiles | None:
        """The files for TLS; `None`: plaintext. Raises `SettingError` for a certificate without a CA."""

        def given(setting: str, variable: str) -> str:
            return setting or self.environment.get(f"TRIPTYCH_TLS_{variable}", "")

        ca = given(self.tls_ca_file, "CA")
        cert, key = given(self.tls_cert_file, "CERT"), given(self.tls_key_file, "KEY")
        if not ca and (cert or key):
            raise SettingError("`tls_ca_file` is missing: a certificate alone does not say whom to trust")
        return TlsFiles(ca, cert, key, given(self.tls_server_name, "SERVER_NAME")) if ca else None

    def fingerprints(self) -> frozenset[bytes]:
        """Those of `proxy_fingerprints`."""
        return frozenset(bytes.fromhex(text) for text in self.proxy_fingerprints)

    def tenant_salt(self) -> bytes:
        """The secret of the environment."""
        return self.environment.get(self.tenant_salt_env, "").encode()

    def max_object_bytes(self) -> int:
        """Largest object in bytes."""
        return self.max_object_mib << 20

    def open(self) -> Store:
        """Opens the store and the connections to peers."""
        options: dict[str, Any] = {"max_bytes": self.max_object_bytes(), "timeout_s": self.timeout_s, "tls": self.tls()}
        store = open_store(self.store, **options)
        peers = [RemoteStore(peer, **options) for peer in self.peers]
        return WithPeers(store, peers) if peers else store


def _is_fingerprint(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and all(c in "0123456789abcdef" for c in text)


_LISTS: dict[str, tuple[Callable[[str], bool], str]] = {
    "peers": (is_authority, "`host:port`"),
    "proxy_fingerprints": (_is_fingerprint, "64 hex digits in lower case"),
}
"""Settings that are lists, with the check and the form of an element."""


def _mistake(name: str, value: Any, default: Any) -> str | None:
    if name in _LISTS:
        is_element, form = _LISTS[name]
        is_good = isinstance(value, list | tuple) and all(isinstance(p, str) and is_element(p) for p in value)
        return None if is_good else f"`{name}` is a list of {form}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"`{name}` is true or false"
    if isinstance(default, int | float):
        allowed = int if isinstance(default, int) else (int, float)
        is_good = isinstance(value, allowed) and not isinstance(value, bool) and 0 < value < 1 << 20
        kind = "an integer" if isinstance(default, int) else "a number"
        return None if is_good else f"`{name}` is {kind} above 0 and below {1 << 20}"
    return None if isinstance(value, str) else f"`{name}` is a text"
