// openai-node: chats, streams and their helper, tools, responses, errors.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL + "/v1", apiKey: "none" });
const model = "smollm2";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

const asked = { model, messages, max_tokens: 24, temperature: 0 };
const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.match(text, /Paris/);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);
const helper = client.chat.completions.stream(asked);
assert.equal(await helper.finalContent(), text);

const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 100 });
const call = await called.finalFunctionToolCall();
assert.ok(["Paris", "Rome"].includes(JSON.parse(call.arguments).city));

const json_schema = { name: "answer", schema: parameters, strict: true };
const formatted = await client.chat.completions.parse({
  model, messages, response_format: { type: "json_schema", json_schema }, max_tokens: 100,
});
assert.ok(["Paris", "Rome"].includes(JSON.parse(formatted.choices[0].message.content).city));

const input = messages[0].content;
const response = await client.responses.create({ model, input, max_output_tokens: 24, temperature: 0 });
assert.equal(response.output_text, text);
const events = client.responses.stream({ model, input, max_output_tokens: 24, temperature: 0 });
assert.equal((await events.finalResponse()).output_text, text);

await assert.rejects(client.chat.completions.create({ model: "gpt-9", messages }), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
