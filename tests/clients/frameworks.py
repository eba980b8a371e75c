"""Checks of frameworks over the API: LangChain, LiteLLM and the OpenAI Agents SDK."""

import asyncio
import os
from typing import Literal

import litellm
import report
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AsyncOpenAI
from pydantic import BaseModel

litellm.api_base = os.environ["OPENAI_BASE_URL"]
ASK = [{"role": "user", "content": "Is it cold?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": report.WEATHER}}]


class Weather(BaseModel):
    """A forecast."""

    unit: Literal["celsius", "fahrenheit"]
    days: Literal[1, 2, 3]


@tool
def weather(unit: Literal["celsius", "fahrenheit"], days: Literal[1, 2, 3]) -> str:
    """The weather of the next days."""
    return f"7 {unit} for {days}"


def invoke_and_stream() -> None:
    model = ChatOpenAI(model="agent", max_completion_tokens=6, temperature=0)
    whole = model.invoke("Is it cold?")
    assert "".join(chunk.content for chunk in model.stream("Is it cold?")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 6


def bind_tools_with_a_loop() -> None:
    model = ChatOpenAI(model="agent")
    asked = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False).invoke("Is it cold?")
    result = weather.invoke(asked.tool_calls[0])
    after = ChatOpenAI(model="agent", max_completion_tokens=6).invoke([("user", "Is it cold?"), asked, result])
    assert isinstance(after.content, str)


def with_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        model = ChatOpenAI(model="agent").with_structured_output(Weather, method=method, strict=True)
        assert isinstance(model.invoke("Is it cold?"), Weather), method


def responses_api() -> None:
    model = ChatOpenAI(model="agent", use_responses_api=True, max_completion_tokens=6, temperature=0)
    assert model.invoke("Is it cold?").text
    assert "".join(chunk.text for chunk in model.stream("Is it cold?"))
    model = ChatOpenAI(model="agent", use_responses_api=True)
    asked = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False).invoke("Is it cold?")
    assert asked.tool_calls[0]["name"] == "weather"


def langchain_embeddings() -> None:
    embedder = OpenAIEmbeddings(model="bart", check_embedding_ctx_length=False)
    assert [len(vector) for vector in embedder.embed_documents(["red", "blue"])] == [36, 36]


def completion_and_stream() -> None:
    settings = {"model": "openai/agent", "messages": ASK, "max_tokens": 6, "temperature": 0}
    whole = litellm.completion(**settings).choices[0].message.content
    chunks = litellm.completion(**settings, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def completion_with_tools() -> None:
    found = litellm.completion(model="openai/agent", messages=ASK, tools=TOOLS, tool_choice="required")
    report.check_weather(found.choices[0].message.tool_calls[0].function.arguments)


def litellm_responses() -> None:
    found = litellm.responses(model="openai/agent", input="Is it cold?", max_output_tokens=6)
    assert found.output[0].content[0].text


def litellm_embedding() -> None:
    found = litellm.embedding(model="openai/bart", input=["red"])
    assert len(found.data[0]["embedding"]) == 36


def litellm_transcription() -> None:
    with open(report.HELDOUT / "digits.wav", "rb") as file:
        found = litellm.transcription(model="openai/digits", file=file)
    assert any(c.isdigit() for c in found.text)


def litellm_errors() -> None:
    for expect, settings in [
        (litellm.NotFoundError, {"model": "openai/gone"}),
        (litellm.BadRequestError, {"model": "openai/agent", "temperature": 9}),
    ]:
        try:
            litellm.completion(**settings, messages=ASK)
        except expect:
            continue
        raise AssertionError(f"no {expect.__name__}")


def agent_with_a_tool_loop() -> None:
    calls = []

    @function_tool
    def forecast(unit: Literal["celsius", "fahrenheit"]) -> str:
        """The weather."""
        calls.append(unit)
        return f"7 {unit}"

    model = OpenAIResponsesModel(model="agent", openai_client=AsyncOpenAI())
    # The runner resets the choice of tools after a call: the second turn is a call or the format.
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, store=False)
    agent = Agent(
        name="a", instructions="Be brief.", model=model, tools=[forecast], model_settings=settings, output_type=Weather
    )
    result = asyncio.run(Runner.run(agent, "Is it cold?", max_turns=40))
    assert calls and isinstance(result.final_output, Weather)


report.run(
    "langchain-openai",
    [invoke_and_stream, bind_tools_with_a_loop, with_structured_output, responses_api, langchain_embeddings],
    "LangChain (langchain-openai)",
)
report.run(
    "litellm",
    [
        completion_and_stream, completion_with_tools, litellm_responses, litellm_embedding, litellm_transcription,
        litellm_errors,
    ],
    "LiteLLM",
)
report.run("openai-agents", [agent_with_a_tool_loop], "OpenAI Agents SDK")
