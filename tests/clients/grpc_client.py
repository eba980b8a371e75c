"""Checks of grpcio with stubs that grpcio-tools makes of the repository's schema."""

import os
import sys
import tempfile

import grpc
import report
from grpc_tools import protoc

STUBS = tempfile.mkdtemp()
PROTO = report.ROOT / "proto"
FILES = [str(path) for path in sorted((PROTO / "triptych" / "v1").glob("*.proto"))]
assert protoc.main(["protoc", f"-I{PROTO}", f"--python_out={STUBS}", f"--grpc_python_out={STUBS}", *FILES]) == 0
sys.path.insert(0, STUBS)

from triptych.v1 import triptych_pb2, triptych_pb2_grpc, types_pb2  # noqa: E402

stub = triptych_pb2_grpc.TriptychStub(grpc.insecure_channel(os.environ["TRIPTYCH_GRPC"]))


def question(**sampling) -> triptych_pb2.GenerateRequest:
    part = types_pb2.Part(text="Is it cold?")
    message = types_pb2.Message(role=types_pb2.ROLE_USER, parts=[part])
    chat = types_pb2.Prompt.Chat(messages=[message])
    return triptych_pb2.GenerateRequest(
        model="agent", prompt=types_pb2.Prompt(chat=chat), sampling=types_pb2.Sampling(**sampling)
    )


def list_models() -> None:
    assert "agent" in [model.name for model in stub.ListModels(triptych_pb2.ListModelsRequest()).models]


def generate() -> None:
    messages = list(stub.Generate(question(max_tokens=6)))
    assert messages[0].WhichOneof("kind") == "accepted" and messages[-1].WhichOneof("kind") == "summary"
    assert "".join(m.delta.text for m in messages)
    assert messages[-1].summary.usage.completion_tokens == 6


def generate_about_an_image() -> None:
    item = triptych_pb2.Item(modality=types_pb2.MODALITY_IMAGE, data=(report.HELDOUT / "scene.png").read_bytes())
    parts = [types_pb2.Part(item=0), types_pb2.Part(text="What is in this picture?")]
    chat = types_pb2.Prompt.Chat(messages=[types_pb2.Message(role=types_pb2.ROLE_USER, parts=parts)])
    request = triptych_pb2.GenerateRequest(model="shapes", prompt=types_pb2.Prompt(chat=chat), items=[item])
    assert "square" in "".join(m.delta.text for m in stub.Generate(request))


def tokenize_and_back() -> None:
    prompt = types_pb2.Prompt(singleton=types_pb2.TextOrTokens(text="cold"))
    asked = types_pb2.TokenizeRequest(model="agent", prompt=prompt, without_special_tokens=True)
    tokens = stub.Tokenize(asked).token_ids
    assert stub.Detokenize(types_pb2.DetokenizeRequest(model="agent", token_ids=tokens)).text == "cold"


def errors_name_the_field() -> None:
    try:
        list(stub.Generate(question(temperature=9)))
    except grpc.RpcError as e:
        assert e.code() == grpc.StatusCode.INVALID_ARGUMENT
        metadata = dict(e.trailing_metadata()) | dict(e.initial_metadata())
        assert metadata.get("triptych-param") == "temperature", metadata
        return
    raise AssertionError("no error")


report.run("grpcio", [list_models, generate, generate_about_an_image, tokenize_and_back, errors_name_the_field])
