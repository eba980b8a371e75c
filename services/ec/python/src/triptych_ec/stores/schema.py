"""The messages of the gRPC service `EcObjects`, built from a table; a test holds it against `worker.proto`.

Built at import rather than generated, so that the package runs with any protobuf that vLLM brings.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "/triptych.v1.EcObjects"

MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "PutFrame.Start": {"key": (1, "bytes"), "len": (2, "uint64")},
    "PutFrame": {"start": (1, "PutFrame.Start"), "data": (2, "bytes")},
    "PutResult": {"stored": (1, "bool")},
    "GetRequest": {"key": (1, "bytes")},
    "GetFrame": {"len": (1, "uint64"), "data": (2, "bytes")},
    "HeadRequest": {"keys": (1, "repeated bytes")},
    "HeadResponse.Entry": {"found": (1, "bool"), "head": (2, "bytes"), "len": (3, "uint64")},
    "HeadResponse": {"entries": (1, "repeated HeadResponse.Entry")},
    "DeleteRequest": {"key": (1, "bytes")},
    "DeleteResponse": {"deleted": (1, "bool")},
    "LeaseRequest.Acquire": {"ttl_ms": (1, "uint64")},
    "LeaseRequest.Renew": {"token": (1, "uint64"), "ttl_ms": (2, "uint64")},
    "LeaseRequest.Release": {"token": (1, "uint64")},
    "LeaseRequest": {
        "key": (1, "bytes"),
        "acquire": (2, "LeaseRequest.Acquire"),
        "renew": (3, "LeaseRequest.Renew"),
        "release": (4, "LeaseRequest.Release"),
    },
    "LeaseResponse": {"done": (1, "bool"), "token": (2, "uint64"), "left_ms": (3, "uint64")},
    "WaitRequest": {"key": (1, "bytes"), "patience_ms": (2, "uint64")},
}
"""Fields of each message: number and type. A nested message is named by its path."""

ONEOFS = {"PutFrame": ("start", "data"), "LeaseRequest": ("acquire", "renew", "release")}
"""Fields of which exactly one is set."""

_SCALARS = {"bytes": 12, "uint64": 4, "bool": 8}


def _flat(name: str) -> str:
    # In a pool of its own, so nesting does not matter: only numbers and types travel.
    return name.replace(".", "")


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="triptych_ec.proto", package="triptych_ec", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=_flat(name))
        if name in ONEOFS:
            message.oneof_decl.add(name="kind")
        for field_name, (number, kind) in fields.items():
            repeated = kind.startswith("repeated ")
            kind = kind.removeprefix("repeated ")
            field = message.field.add(name=field_name, number=number, label=3 if repeated else 1)
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = 11, f".triptych_ec.{_flat(kind)}"
            if field_name in ONEOFS.get(name, ()):
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"triptych_ec.{_flat(name)}")) for name in MESSAGES}


message = _build().__getitem__
"""The class of a message by its name."""
