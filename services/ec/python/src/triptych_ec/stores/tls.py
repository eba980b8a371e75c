"""TLS to an `EcObjects` server. Triptych's own is mutual: the client shows a certificate of the cluster's CA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ..errors import SettingError


@dataclass(frozen=True)
class TlsFiles:
    """The files of a process, in PEM, as Triptych's `--tls-ca`, `--tls-cert`, `--tls-key` and `--tls-server-name`."""

    ca: str
    """Certificates of the cluster's CA."""
    cert: str = ""
    """This process's certificate with its chain; empty: none is shown."""
    key: str = ""
    """Its private key."""
    server_name: str = ""
    """Name in the servers' certificates; empty: the host that is dialled."""

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel needs. Raises `SettingError` for a file that cannot be read or is no PEM."""
        if bool(self.cert) != bool(self.key):
            raise SettingError("`tls_cert_file` and `tls_key_file` are given together")
        own = (_pem("tls_key_file", self.key), _pem("tls_cert_file", self.cert)) if self.cert else (None, None)
        return grpc.ssl_channel_credentials(_pem("tls_ca_file", self.ca), *own)

    def options(self) -> list[tuple[str, str]]:
        """Options of a channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def _pem(setting: str, path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise SettingError(f"`{setting}`: {e}") from e
    if b"-----BEGIN " not in data:
        raise SettingError(f"`{setting}`: {path} is no PEM file")
    return data
