// Asks sparkd with the AI SDK, as a stream: ask.mjs BASE_URL KEY. Prints the text, or the error and how often it asked.
import { createOpenAI } from "@ai-sdk/openai";
import { streamText } from "ai";

const [baseURL, apiKey] = process.argv.slice(2);
const failures = [];
const { textStream } = streamText({
  model: createOpenAI({ baseURL, apiKey })("tiny"),
  prompt: "What is the capital of France?",
  onError: ({ error }) => failures.push(error),
});
for await (const text of textStream) process.stdout.write(text);
for (const error of failures) {
  console.error(error.message ?? JSON.stringify(error));
  process.exitCode = 1;
}
