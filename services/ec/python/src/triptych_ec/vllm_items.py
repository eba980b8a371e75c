"""Items of vLLM's requests: which of their fields are input of an encoder, their extent, and what their rows must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .expected import Expected
from .extents import Extent, Grid, Windows
from .items import DTYPE_BYTES
from .keys import content_key, proxy_key
from .loading import Wanted
from .model import published_tower, row_width
from .settings import ConnectorSettings
from .tensors import dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS = "vllm mm identifier v1"
"""The form of the item in a content key: vLLM's identifier in place of the item's bytes."""

PUBLISHED = "image"
"""The kind of items that are published under keys of Triptych's proxy: videos have times, which vLLM does not tell."""

_ANY_DTYPE = frozenset(DTYPE_BYTES)


class ItemKeys:
    """The object that an item's rows lie in, and what it must be."""

    def __init__(self, vllm_config: VllmConfig, settings: ConnectorSettings, encoder: bytes) -> None:
        self._config = vllm_config
        self._encoder = encoder
        self._salt = settings.tenant_salt()
        self._accept_proxy_keys = settings.accept_proxy_keys
        self._of_proxy = settings.fingerprints()
        self._dtypes = frozenset({dtype_name(vllm_config.model_config.dtype)})
        self._published = published_fingerprint(vllm_config, settings)

    def shared_key(self, identifier: str) -> bytes | None:
        """The key in an identifier of Triptych's proxy, where such identifiers are accepted."""
        return proxy_key(identifier) if self._accept_proxy_keys else None

    def published(self, modality: str) -> bytes | None:
        """The fingerprint of rows that are published under such a key; `None`: none are of this kind of item."""
        return self._published if modality == PUBLISHED else None

    def wanted(self, feature: Any, can_encode: bool) -> Wanted:
        """What is looked for. An object of a Triptych encoder may have any type of rows; vLLM's are of the model's."""
        n_tokens = feature.mm_position.get_num_embeds()
        key = self.shared_key(feature.identifier)
        expected = Expected(
            n_tokens=n_tokens,
            dtypes=self._dtypes if key is None else _ANY_DTYPE,
            fingerprints=frozenset({self._encoder}) if key is None else self._of_proxy,
            hidden=None if key is None else row_width(self._config, feature.modality),
            grid=grid_of_feature(feature),
            modality=feature.modality,
        )
        return Wanted(feature.identifier, key or self._own_key(feature), expected, can_encode)

    def _own_key(self, feature: Any) -> bytes:
        item = feature.identifier.encode()
        return content_key(self._encoder, feature.modality, item, options=OPTIONS, tenant_salt=self._salt)


def published_fingerprint(vllm_config: VllmConfig, settings: ConnectorSettings) -> bytes | None:
    """The fingerprint of rows that an encoder publishes under keys of Triptych's proxy; `None`: this instance publishes none.

    Raises `SettingError` for an encoder whose rows no PD worker of Triptych takes.
    """
    if not publishes_for_proxy(vllm_config, settings):
        return None
    return published_tower(vllm_config).rows_of_vllm(PUBLISHED, dtype_name(vllm_config.model_config.dtype))


def publishes_for_proxy(vllm_config: VllmConfig, settings: ConnectorSettings) -> bool:
    """True of an instance that only encodes and accepts the proxy's keys."""
    transfer: Any = vllm_config.ec_transfer_config
    return settings.accept_proxy_keys and transfer.ec_role == "ec_producer"


class InputFields:
    """Which fields of an item are metadata, and which are the input of an encoder."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)

    def can_encode(self, feature: Any) -> bool:
        """True if the item came with its input, and not with metadata alone."""
        if not feature.data:
            return False
        metadata = self._resolver.fields_for(feature.modality)
        return any(value.data is not None for name, value in feature.data.items() if name not in metadata)

    def response_params(self, features: list) -> dict[str, Any]:
        """What vLLM's own connectors return for a consumer."""
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        return collect_ec_item_metadata(features, self._resolver)


def grid_of_feature(feature: Any) -> tuple[int, int, int] | None:
    """The patches of an item before merging, time first, where the model has a grid."""
    for name in ("image_grid_thw", "video_grid_thw"):
        value = feature.data.get(name) if feature.data else None
        numbers = torch.as_tensor(value.data).flatten().tolist() if value is not None else []
        if len(numbers) == 3 and all(0 < n < 1 << 32 for n in numbers):
            t, h, w = map(int, numbers)
            return t, h, w
    return None


def extent_of(feature: Any, n_tokens: int) -> Extent:
    """The item's grid where the model has one, else a row of so many patches, or one window."""
    grid = grid_of_feature(feature)
    if grid is not None:
        return Grid(*grid)
    return Windows(1, 0) if feature.modality == "audio" else Grid(1, 1, n_tokens)
