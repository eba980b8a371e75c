"""Conversations with tools, rendered by transformers: templates in the formats of the published ones, and what is made of them.

Writes `chat_tools/templates.json`: for each template its text, and cases of messages, tools and options with the text that
`apply_chat_template` renders.
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

HERMES = r"""{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n<tool_call>{name, arguments}</tool_call><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if loop.index0 > ns.last_user and message.reasoning_content %}
            {{- '\n<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n' }}
        {%- endif %}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\n' }}
        {%- if loop.first and tools is not none %}
            {{- 'Respond {"name": function name, "parameters": dictionary}.\n' }}
            {%- for t in tools %}
                {{- t | tojson(indent=4) }}
                {{- "\n\n" }}
            {%- endfor %}
        {%- endif %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|assistant|>\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- '<|ipython|>\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}
"""
MISTRAL = r"""{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "city": {"type": "string", "description": "Ort, z.B. Köln", "default": 1e-05},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ASK = {"role": "user", "content": "Wie ist's in Köln?"}
ARGUMENTS = {"city": "Köln", "n": 1.0, "deep": [{"b": 1, "a": None, "c": True}], "none": {}}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
LOOP = [
    ASK,
    {"role": "assistant", "content": "", "reasoning_content": "Ask.\n", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 7}', "tool_call_id": "abcdefgh1"},
]
OPEN = [ASK, {"role": "assistant", "content": " Es ist "}]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def case(template, messages, tools=None, kwargs=None, ending="generation_prompt"):
    options = {
        "generation_prompt": {"add_generation_prompt": True},
        "last_message": {},
        "open_message": {"continue_final_message": True},
    }[ending]
    rendered, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, **options, **(kwargs or {}), **SPECIALS
    )
    return {
        "messages": messages,
        "tools": tools or [],
        "kwargs": kwargs or {},
        "ending": ending,
        "rendered": rendered[0],
    }


def cases(template):
    return [
        case(template, LOOP, TOOLS),
        case(template, [ASK], TOOLS[:1]),
        case(template, [ASK], kwargs={"enable_thinking": False}),
        case(template, OPEN, ending="open_message"),
        case(template, OPEN, ending="last_message"),
    ]


def make():
    folder = Path(__file__).parent / "chat_tools"
    folder.mkdir(exist_ok=True)
    templates = {"hermes": HERMES, "llama3": LLAMA, "mistral": MISTRAL}
    out = [{"name": n, "template": t, "cases": cases(t)} for n, t in templates.items()]
    text = json.dumps(out, ensure_ascii=False, indent=1)
    (folder / "templates.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    make()
