// The official npm package, unchanged: everything that the tests ask, printed as one JSON object.

import OpenAI from "openai";
import { VERSION } from "openai/version";

const { BASE_URL, API_KEY, REVOKED_KEY, LIMITED_KEY, MODEL } = process.env;
const connect = (apiKey) => new OpenAI({ baseURL: BASE_URL, apiKey, maxRetries: 0 });
const client = connect(API_KEY);
const messages = [{ role: "user", content: "Tell me a story about a lighthouse." }];
const plain = { model: MODEL, messages, temperature: 0, max_tokens: 24 };
const chat = (more = {}) => client.chat.completions.create({ ...plain, ...more });
const text = (answer) => answer.choices[0].message.content;

async function refusal(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

async function streamed() {
  let words = "";
  let usage = null;
  const stream = await chat({ stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    words += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { words, usage };
}

async function helped() {
  const runner = client.chat.completions.stream(plain);
  return runner.finalContent();
}

const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, large: { type: "boolean" } },
  required: ["city", "large"],
  additionalProperties: false,
};
const whole = await chat();
const stop = text(whole).slice(20, 24);
const tool = { type: "function", function: { name: "weather", parameters: { type: "object" } } };
const drawn = { temperature: 1, seed: 7 };
const told = await chat({ logprobs: true, top_logprobs: 2, max_tokens: 4 });
const embedded = { model: MODEL, input: ["A lighthouse stands on a rock."] };

const found = {
  version: VERSION,
  whole: text(whole),
  usage: whole.usage,
  streamed: await streamed(),
  helped: await helped(),
  logprobs: told.choices[0].logprobs.content,
  three: (await chat({ n: 3, temperature: 1, seed: 5 })).choices.map((choice) => choice.message.content),
  stop,
  stopped: text(await chat({ stop: [stop] })),
  drawn: [text(await chat(drawn)), text(await chat(drawn)), text(await chat({ ...drawn, seed: 8 }))],
  schema,
  json: text(
    await chat({
      messages: [{ role: "user", content: "Describe Paris as JSON." }],
      max_tokens: 120,
      response_format: { type: "json_schema", json_schema: { name: "city", schema, strict: true } },
    }),
  ),
  // Without a word of encoding it asks for base64 and decodes that.
  embedding: (await client.embeddings.create(embedded)).data[0].embedding,
  floats: (await client.embeddings.create({ ...embedded, encoding_format: "float" })).data[0].embedding,
  response: (
    await client.responses.create({
      model: MODEL,
      input: messages[0].content,
      temperature: 0,
      max_output_tokens: 24,
    })
  ).output_text,
  models: (await client.models.list()).data.map((model) => model.id),
  refusals: {
    tools: await refusal(() => chat({ tools: [tool] })),
    surprise: await refusal(() => chat({ surprise: 1 })),
    suffix: await refusal(() => client.completions.create({ model: MODEL, prompt: "a", suffix: "b" })),
    previous: await refusal(() =>
      client.responses.create({ model: MODEL, input: "a", previous_response_id: "resp_1" }),
    ),
    context: await refusal(() => chat({ messages: [{ role: "user", content: "a word ".repeat(9000) }] })),
    model: await refusal(() => chat({ model: "gpt-17" })),
    wrong: await refusal(() => connect("nesa-wrong-wrong-wrong-wrong").models.list()),
    revoked: await refusal(() => connect(REVOKED_KEY).models.list()),
    limited: await refusal(async () => {
      await connect(LIMITED_KEY).chat.completions.create({ ...plain, max_tokens: 1 });
      await connect(LIMITED_KEY).chat.completions.create({ ...plain, max_tokens: 1 });
    }),
  },
};
console.log(JSON.stringify(found));
