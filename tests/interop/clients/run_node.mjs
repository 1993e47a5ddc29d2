// Node's openai, Vercel's ai with three providers, OpenAI's agents, and cohere-ai: chats, streams, tools in a loop,
// schemas.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { generateText, streamText, embedMany, tool, stepCountIs, Output, APICallError } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool as agentTool } from "@openai/agents";
import { CohereClientV2 } from "cohere-ai";
import { z } from "zod";

const base = process.argv[2];
const Ticket = z.object({ topic: z.enum(["refund", "delivery"]), urgent: z.boolean() });

async function openai() {
  const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: "Sort ascending: 31, 7, 19" }];
  const answer = await client.chat.completions.create({ model: "small", messages, store: true });
  assert.equal(answer.choices[0].message.content, "7, 19, 31");
  let said = "";
  for await (const chunk of await client.chat.completions.create({ model: "small", messages, stream: true })) {
    said += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(said, "7, 19, 31");
  const parsed = await client.chat.completions.parse({
    model: "small",
    messages: [{ role: "user", content: "I never got my lamp." }],
    response_format: zodResponseFormat(Ticket, "ticket"),
  });
  assert.ok(Ticket.parse(parsed.choices[0].message.parsed));
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = ["weather", "wind"].map((name) => ({
    type: "function",
    function: {
      name,
      description: "Tells it.",
      parameters,
      parse: JSON.parse,
      function: ({ city }) => `${name} in ${city}`,
    },
  }));
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      model: "agent",
      messages: [{ role: "user", content: "Weather?" }],
      tools,
      ...(stream ? { stream } : {}),
    });
    assert.equal(await runner.finalContent(), "You said: wind in Oslo");
  }
  const stream = client.responses.stream({ model: "small", input: "Sort ascending: 31, 7, 19" });
  assert.equal((await stream.finalResponse()).output_text, "7, 19, 31");
  let input = [{ role: "user", content: "Weather?" }];
  const offered = [{ type: "function", name: "weather", parameters, strict: false }];
  for (;;) {
    const response = await client.responses.create({ model: "agent", input, tools: offered });
    input = [...input, ...response.output];
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) {
      assert.equal(response.output_text, "You said: rain");
      break;
    }
    input.push(...calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "rain" })));
  }
  const found = await client.embeddings.create({ model: "embed", input: ["w1", "w2"] });
  assert.equal(found.data[0].embedding.length, 32);
  await assert.rejects(client.chat.completions.create({ model: "none", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.ok(error.requestID);
    return true;
  });
}

async function vercel() {
  const provider = createOpenAICompatible({
    name: "sluice",
    baseURL: base,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const city = z.object({ city: z.string() });
  const tools = {
    weather: tool({ description: "Tells it.", inputSchema: city, execute: async ({ city }) => `rain in ${city}` }),
    wind: tool({ description: "Tells it.", inputSchema: city, execute: async ({ city }) => ({ calm: city }) }),
  };
  const asked = { model: provider("agent"), tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  const first = await generateText({ ...asked, system: "Be brief.", prompt: "Weather?" });
  assert.equal(first.text, 'You said: {"calm":"Oslo"}');
  assert.equal(first.steps.length, 3);
  const messages = [
    { role: "user", content: "Weather?" },
    ...first.response.messages,
    { role: "user", content: "And now?" },
  ];
  const again = streamText({ ...asked, messages });
  let said = "";
  for await (const part of again.textStream) said += part;
  assert.equal(said, 'You said: {"calm":"Oslo"}');
  assert.ok((await again.usage).totalTokens > 0);
  const shaped = await generateText({
    model: provider("small"),
    prompt: "I never got my lamp.",
    output: Output.object({ schema: Ticket }),
    maxRetries: 0,
  });
  assert.ok(Ticket.parse(shaped.output));
  const both = await generateText({
    ...asked,
    prompt: "I never got my lamp.",
    output: Output.object({ schema: Ticket }),
  });
  assert.ok(Ticket.parse(both.output));
  const vectors = await embedMany({ model: provider.textEmbeddingModel("embed"), values: ["w1", "w2"] });
  assert.equal(vectors.embeddings.length, 2);
  await assert.rejects(generateText({ model: provider("none"), prompt: "a", maxRetries: 0 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /no model 'none'/);
    return true;
  });
}

async function vercelOfficial() {
  const openaiOwn = createOpenAI({ baseURL: base, apiKey: "none" });
  const anthropic = createAnthropic({ baseURL: base, apiKey: "none" });
  const city = z.object({ city: z.string() });
  const tools = {
    weather: tool({ description: "Tells it.", inputSchema: city, execute: async ({ city }) => `rain in ${city}` }),
  };
  for (const served of [openaiOwn.chat, openaiOwn.responses, anthropic]) {
    const sorted = { model: served("small"), prompt: "Sort ascending: 31, 7, 19", maxRetries: 0 };
    assert.equal((await generateText(sorted)).text, "7, 19, 31");
    let said = "";
    for await (const part of streamText(sorted).textStream) said += part;
    assert.equal(said, "7, 19, 31");
    for (const toolChoice of ["auto", "required"]) {
      const asked = { model: served("agent"), tools, maxRetries: 0, toolChoice, prompt: "Weather?" };
      const called = await generateText(asked);
      assert.deepEqual(called.toolCalls[0].input, { city: "Oslo" });
      const again = await generateText({
        ...asked,
        toolChoice: "auto",
        prompt: undefined,
        messages: [{ role: "user", content: "Weather?" }, ...called.response.messages],
      });
      assert.equal(again.text, "You said: rain in Oslo");
    }
  }
  for (const served of [openaiOwn.chat, openaiOwn.responses]) {
    const shaped = await generateText({
      model: served("small"),
      prompt: "I never got my lamp.",
      output: Output.object({ schema: Ticket }),
      maxRetries: 0,
    });
    assert.ok(Ticket.parse(shaped.output));
  }
}

async function agents() {
  setTracingDisabled(true);
  const weather = agentTool({
    name: "weather",
    description: "Tells it.",
    parameters: z.object({ city: z.enum(["Oslo"]) }),
    execute: async ({ city }) => `rain in ${city}`,
  });
  for (const useResponses of [false, true]) {
    const provider = new OpenAIProvider({ baseURL: base, apiKey: "none", useResponses });
    const runner = new Runner({ modelProvider: provider });
    const agent = new Agent({ name: "a", instructions: "Be brief.", model: "agent", tools: [weather] });
    assert.equal((await runner.run(agent, "Weather?")).finalOutput, "You said: rain in Oslo");
    const streamed = await runner.run(agent, "Weather?", { stream: true });
    for await (const _ of streamed);
    assert.equal(streamed.finalOutput, "You said: rain in Oslo");
    for (const model of ["agent", "tools"]) {
      const held = agent.clone({
        model,
        modelSettings: { toolChoice: "required", maxTokens: 200 },
        toolUseBehavior: "stop_on_first_tool",
      });
      assert.equal((await runner.run(held, "Weather?")).finalOutput, "rain in Oslo");
    }
    const typed = new Agent({ name: "b", model: "small", outputType: Ticket });
    assert.ok(Ticket.parse((await runner.run(typed, "I never got my lamp.")).finalOutput));
  }
}

async function cohere() {
  const client = new CohereClientV2({ token: "none", environment: base.replace(/\/v1$/, "") });
  const found = await client.rerank({ model: "rank", query: "w1", documents: ["w2", "w3"], topN: 1 });
  assert.equal(found.results.length, 1);
  assert.ok(found.results[0].relevanceScore);
}

for (const check of [openai, vercel, vercelOfficial, agents, cohere]) await check();
