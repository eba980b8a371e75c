"""Checks of openai-python: chat, streams, tools, parsing, audio, embeddings, responses and the classes of errors."""

import base64
import wave
from typing import Literal

import openai
import report
from pydantic import BaseModel, Field

# Answers have to be of the library's types, which it does not check by itself.
client = openai.OpenAI(max_retries=0, _strict_response_validation=True)
# It asks for embeddings in base64, which are not of the type that it makes of them.
embedder = openai.OpenAI(max_retries=0)
ASK = [{"role": "user", "content": "Is it cold?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": report.WEATHER, "strict": True}}]


class Weather(BaseModel):
    """Arguments of the tool, and a format of answers."""

    unit: Literal["celsius", "fahrenheit"]
    days: Literal[1, 2, 3]


class Count(BaseModel):
    """A format with a bounded text."""

    word: str = Field(max_length=5)


def models() -> None:
    assert "agent" in [model.id for model in client.models.list()]
    assert client.models.retrieve("agent").id == "agent"


def chat() -> None:
    answer = client.chat.completions.create(model="agent", messages=ASK, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def chat_stream() -> None:
    settings = {"model": "agent", "messages": ASK, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**settings).choices[0].message.content
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 8


def chat_logprobs() -> None:
    answer = client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2, 2, 2]


def chat_image() -> None:
    url = "data:image/png;base64," + base64.b64encode((report.HELDOUT / "scene.png").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in this picture?"}]
    answer = client.chat.completions.create(model="shapes", messages=[{"role": "user", "content": parts}])
    assert "square" in answer.choices[0].message.content


def chat_audio() -> None:
    data = base64.b64encode((report.HELDOUT / "digits.wav").read_bytes()).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    answer = client.chat.completions.create(model="digits", messages=[{"role": "user", "content": parts}])
    assert any(c.isdigit() for c in answer.choices[0].message.content)


def chat_tool_loop() -> None:
    messages = list(ASK)
    answer = client.chat.completions.create(
        model="agent", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 1
    report.check_weather(message.tool_calls[0].function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees"}]
    answer = client.chat.completions.create(model="agent", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=6)
    assert isinstance(answer.choices[0].message.content, str)


def chat_tool_stream_helper() -> None:
    with client.chat.completions.stream(
        model="agent", messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    report.check_weather(final.choices[0].message.tool_calls[0].function.arguments)


def chat_parse() -> None:
    answer = client.chat.completions.parse(model="agent", messages=ASK, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def chat_parse_beside_tools() -> None:
    answer = client.chat.completions.parse(
        model="agent", messages=ASK, response_format=Weather, tools=[openai.pydantic_function_tool(Weather)]
    )
    message = answer.choices[0].message
    found = message.parsed or message.tool_calls[0].function.parsed_arguments
    assert isinstance(found, Weather)


def completions() -> None:
    answer = client.completions.create(model="agent", prompt=["cold", "warm"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 4


def transcriptions_in_all_formats() -> None:
    texts = {}
    for form in ("json", "text", "srt", "verbose_json", "vtt"):
        with open(report.HELDOUT / "digits.wav", "rb") as file:
            found = client.audio.transcriptions.create(model="digits", file=file, response_format=form)
        texts[form] = found if isinstance(found, str) else found.text
    digits = texts["text"].strip()
    assert digits and all(digits.split()[0] in text for text in texts.values()), texts
    assert texts["srt"].startswith("1\n") and texts["vtt"].startswith("WEBVTT")


def transcription_stream() -> None:
    with open(report.HELDOUT / "digits.wav", "rb") as file:
        events = list(client.audio.transcriptions.create(model="digits", file=file, stream=True))
    assert events[-1].type == "transcript.text.done"
    assert events[-1].usage.type == "tokens" and events[-1].usage.output_tokens > 0, events[-1].usage
    assert "".join(e.delta for e in events[:-1]).strip() == events[-1].text


def realtime_transcription() -> None:
    with wave.open(str(report.HELDOUT / "digits.wav")) as file:
        rate, samples = file.getframerate(), file.readframes(file.getnframes())
    with open(report.HELDOUT / "digits.wav", "rb") as file:
        expect = client.audio.transcriptions.create(model="digits", file=file).text
    audio_format = {"type": "audio/pcm", "rate": rate}
    settings = {"format": audio_format, "transcription": {"model": "digits"}, "turn_detection": None}
    text = ""
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        connection.session.update(session={"type": "transcription", "audio": {"input": settings}})
        for start in range(0, len(samples), rate):
            audio = base64.b64encode(samples[start : start + rate]).decode()
            connection.input_audio_buffer.append(audio=audio)
        connection.input_audio_buffer.commit()
        for event in connection:
            assert event.type != "error", event
            if event.type == "conversation.item.input_audio_transcription.delta":
                text += event.delta
            if event.type == "conversation.item.input_audio_transcription.completed":
                break
    assert event.transcript == text.strip() and event.transcript.split() == expect.split(), (event, expect)


def embeddings() -> None:
    found = embedder.embeddings.create(model="bart", input=["red", "blue"])
    assert [len(entry.embedding) for entry in found.data] == [36, 36]
    assert abs(sum(x * x for x in found.data[0].embedding) - 1) < 1e-5
    floats = embedder.embeddings.create(model="bart", input="red", encoding_format="float")
    assert all(abs(a - b) < 1e-6 for a, b in zip(floats.data[0].embedding, found.data[0].embedding))


def responses() -> None:
    found = client.responses.create(model="agent", input="Is it cold?", max_output_tokens=6, store=False, temperature=0)
    assert found.status == "incomplete" and found.output_text and found.usage.output_tokens == 6


def responses_stream() -> None:
    settings = {"model": "agent", "input": "Is it cold?", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**settings).output_text
    events = list(client.responses.create(**settings, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole
    with client.responses.stream(**settings) as stream:
        for _ in stream:
            pass
        # The helper keeps a final response of complete ones alone.
    thought = list(client.responses.create(model="thinks", input="Is it cold?", max_output_tokens=6, stream=True))
    assert any(event.type == "response.reasoning_text.delta" for event in thought)


def responses_tool_loop() -> None:
    tool = {"type": "function", "name": "weather", "parameters": report.WEATHER, "strict": True}
    conversation = [{"role": "user", "content": "Is it cold?"}]
    found = client.responses.create(model="agent", input=conversation, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    call = next(item for item in found.output if item.type == "function_call")
    report.check_weather(call.arguments)
    conversation += found.output
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"})
    after = client.responses.create(model="agent", input=conversation, tools=[tool], tool_choice="none", max_output_tokens=6)
    assert after.output[0].type == "message"


def responses_parse() -> None:
    found = client.responses.parse(model="agent", input="Is it cold?", text_format=Weather)
    assert isinstance(found.output_parsed, Weather)


def errors_are_the_classes_of_the_library() -> None:
    for expect, call in [
        (openai.NotFoundError, lambda: client.chat.completions.create(model="gone", messages=ASK)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="agent", messages=ASK, temperature=9)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="agent", messages=[])),
        (openai.BadRequestError, lambda: client.responses.create(model="agent", input="a", previous_response_id="resp_1")),
        (openai.NotFoundError, lambda: client.responses.retrieve("resp_1")),
        (openai.BadRequestError, lambda: embedder.embeddings.create(model="agent", input="a")),
    ]:
        try:
            call()
        except openai.APIStatusError as e:
            assert type(e) is expect and e.request_id, f"{type(e).__name__}: {e}"
        else:
            raise AssertionError(f"no {expect.__name__}")


report.run(
    "openai",
    [
        models, chat, chat_stream, chat_logprobs, chat_image, chat_audio, chat_tool_loop, chat_tool_stream_helper,
        chat_parse, chat_parse_beside_tools, completions, transcriptions_in_all_formats, transcription_stream, realtime_transcription,
        embeddings, responses, responses_stream, responses_tool_loop, responses_parse, errors_are_the_classes_of_the_library,
    ],
    "openai-python",
)
