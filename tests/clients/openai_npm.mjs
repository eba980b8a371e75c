// Checks of the npm package openai: chat, streams, tools, transcriptions, embeddings, responses and the classes of errors.

import fs from "node:fs";
import path from "node:path";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const version = JSON.parse(fs.readFileSync(new URL("./node_modules/openai/package.json", import.meta.url))).version;
const heldout = path.join(process.env.TRIPTYCH_ROOT, "tests/models/heldout");
const messages = [{ role: "user", content: "Is it cold?" }];
const parameters = {
  type: "object",
  properties: { unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
  required: ["unit"],
  additionalProperties: false,
};

function expect(condition, found) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(found)}`);
}

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model: "agent", messages, max_tokens: 6 });
    expect(answer.usage.completion_tokens === 6, answer);
  },
  async "chat stream"() {
    const stream = await client.chat.completions.create({ model: "agent", messages, max_tokens: 6, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    expect(text.length > 0, text);
  },
  async "tool loop"() {
    const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
    const asked = { model: "agent", messages, tools, tool_choice: "required", parallel_tool_calls: false };
    const { message } = (await client.chat.completions.create(asked)).choices[0];
    const call = message.tool_calls[0];
    expect(["celsius", "fahrenheit"].includes(JSON.parse(call.function.arguments).unit), call);
    const result = { role: "tool", tool_call_id: call.id, content: "7 degrees" };
    const after = { model: "agent", messages: [...messages, message, result], max_tokens: 6 };
    expect(typeof (await client.chat.completions.create(after)).choices[0].message.content === "string");
  },
  async transcription() {
    const file = fs.createReadStream(path.join(heldout, "digits.wav"));
    const found = await client.audio.transcriptions.create({ model: "digits", file });
    expect(/\d/.test(found.text), found);
  },
  async embeddings() {
    const found = await client.embeddings.create({ model: "bart", input: ["red", "blue"] });
    expect(found.data.length === 2 && found.data[0].embedding.length === 36, found);
  },
  async responses() {
    const found = await client.responses.create({ model: "agent", input: "Is it cold?", max_output_tokens: 6 });
    expect(found.output_text.length > 0 && found.status === "incomplete", found);
  },
  async "responses stream"() {
    const stream = client.responses.stream({ model: "agent", input: "Is it cold?", max_output_tokens: 6 });
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    const final = await stream.finalResponse();
    expect(final.output_text === text && text.length > 0, final);
  },
  async "responses tool loop"() {
    const tools = [{ type: "function", name: "weather", parameters, strict: true }];
    const asked = { model: "agent", input: messages, tools, tool_choice: "required", parallel_tool_calls: false };
    const { output } = await client.responses.create(asked);
    const call = output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: "7 degrees" };
    const after = await client.responses.create({ model: "agent", input: [...messages, ...output, result], max_output_tokens: 6 });
    expect(after.output[0].type === "message", after);
  },
  async "errors are the classes of the library"() {
    const bad = client.chat.completions.create({ model: "agent", messages, temperature: 9 });
    expect((await bad.catch((e) => e)) instanceof OpenAI.BadRequestError);
    const gone = client.chat.completions.create({ model: "gone", messages });
    expect((await gone.catch((e) => e)) instanceof OpenAI.NotFoundError);
  },
};

for (const [check, body] of Object.entries(checks)) {
  let error = null;
  try {
    await body();
  } catch (e) {
    error = String(e).slice(0, 400);
  }
  console.log(JSON.stringify({ client: "openai (npm)", version, check, error }));
}
