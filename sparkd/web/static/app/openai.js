// One request to a model: what is sent, and what has come of its answer so far.

import { Refused, request, storedKey } from "./api.js";
import { batch, signal } from "./lib.js";
import { eventsOf } from "./sse.js";

/** @type {Record<string, string>} */
export const ROUTES = { chat: "/v1/chat/completions", completion: "/v1/completions", embeddings: "/v1/embeddings", rerank: "/v1/rerank" };

/** @typedef {{id: string, name: string, arguments: string}} ToolCall */

/** A request and its answer. It draws at most once a frame, however fast tokens come. */
export class Run {
  /** @param {string} mode @param {Record<string, any>} body */
  constructor(mode, body) {
    this.mode = mode;
    this.body = body;
    this.abort = new AbortController();
    this.began = performance.now();
    /** @type {Signal<{text: string, reasoning: string, calls: ToolCall[], tokens: number, exact: boolean, firstS: number | null, lastS: number}>} */
    this.answer = signal({ text: "", reasoning: "", calls: [], tokens: 0, exact: false, firstS: null, lastS: 0 });
    /** The body of an answer that does not stream. @type {Signal<any>} */
    this.whole = signal(null);
    /** @type {Signal<any>} */
    this.usage = signal(null);
    /** @type {Signal<"running" | "done" | "stopped" | "failed">} */
    this.state = signal("running");
    this.problem = signal("");
    /** Seconds until its end. @type {number | null} */
    this.tookS = null;
    this.draft = { ...this.answer.peek() };
    this.frame = 0;
  }

  get secondsSoFar() {
    return (performance.now() - this.began) / 1000;
  }

  async start() {
    try {
      const response = await request("POST", ROUTES[this.mode] ?? "", { body: this.body, signal: this.abort.signal });
      if (this.body.stream) {
        for await (const { event, data } of eventsOf(response)) {
          if (event === "comment" || data === "[DONE]") continue;
          this.#take(JSON.parse(data));
        }
      } else {
        this.whole.value = await response.json();
        this.usage.value = this.whole.value.usage ?? null;
      }
      this.#end("done");
    } catch (error) {
      if (this.abort.signal.aborted) return this.#end("stopped");
      // A stream whose connection is lost ends with a TypeError.
      const why = error instanceof TypeError ? "the connection to sparkd was lost." : error;
      this.problem.value = error instanceof Refused ? error.message : `The answer broke off: ${why}`;
      this.#end("failed");
    }
  }

  stop() {
    this.abort.abort();
  }

  /** @param {any} chunk */
  #take(chunk) {
    if (chunk.error) throw new Refused(String(chunk.error.message ?? chunk.error), 500);
    const draft = this.draft;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const text = delta.content ?? choice?.text ?? "";
    const reasoning = delta.reasoning ?? "";
    draft.text += text;
    draft.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) draft.calls = withPart(draft.calls, call);
    if (text || reasoning || delta.tool_calls?.length) {
      draft.firstS ??= this.secondsSoFar;
      draft.lastS = this.secondsSoFar;
      if (!draft.exact) draft.tokens += 1;
    }
    const made = chunk.usage?.completion_tokens;
    if (made != null) {
      draft.tokens = made;
      draft.exact = true;
      this.usage.value = chunk.usage;
    }
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    this.answer.value = { ...this.draft };
  }

  /** @param {"done" | "stopped" | "failed"} state */
  #end(state) {
    cancelAnimationFrame(this.frame);
    this.tookS = this.secondsSoFar;
    batch(() => {
      this.#draw();
      this.state.value = state;
    });
  }
}

/** Tokens per second after the first token. @param {{tokens: number, firstS: number | null, lastS: number}} answer */
export function speedOf({ tokens, firstS, lastS }) {
  return firstS === null || lastS <= firstS || tokens < 2 ? null : (tokens - 1) / (lastS - firstS);
}

/** @param {ToolCall[]} calls @param {any} part */
function withPart(calls, part) {
  const place = part.index ?? 0;
  const before = calls[place] ?? { id: "", name: "", arguments: "" };
  const after = { id: part.id ?? before.id, name: before.name + (part.function?.name ?? ""), arguments: before.arguments + (part.function?.arguments ?? "") };
  return [...calls.slice(0, place), after, ...calls.slice(place + 1)];
}

/** The request for a POSIX shell; the key is taken from SPARKD_API_KEY. @param {string} mode @param {Record<string, any>} body */
export function curlText(mode, body) {
  const lines = [`curl${body.stream ? " -N" : ""} ${location.origin}${ROUTES[mode]}`];
  if (storedKey()) lines.push('-H "Authorization: Bearer $SPARKD_API_KEY"');
  lines.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(body).replaceAll("'", "'\"'\"'")}'`);
  return lines.join(" \\\n  ");
}

/** The request for Python's openai package, or requests where that has no such call. @param {string} mode @param {Record<string, any>} body */
export function pythonText(mode, body) {
  const key = storedKey() ? 'os.environ["SPARKD_API_KEY"]' : '"none"';
  const head = storedKey() ? "import os\n\n" : "";
  const { stream_options: options, ...fields } = body;
  if (mode === "rerank") {
    return `${head}import httpx\n\nanswer = httpx.post(\n    "${location.origin}${ROUTES.rerank}",\n    headers={"Authorization": "Bearer " + ${key}},\n    json=${pythonValue(fields, 4)},\n)\nprint(answer.json())\n`;
  }
  /** @type {Record<string, string>} */
  const calls = { chat: "chat.completions", completion: "completions", embeddings: "embeddings" };
  const known = Object.entries(fields).map(([name, value]) => `    ${name}=${pythonValue(value, 4)},`);
  const begin = `${head}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key})\nanswer = client.${calls[mode]}.create(\n${known.join("\n")}\n)\n`;
  if (!fields.stream) return `${begin}print(answer)\n`;
  const part = mode === "chat" ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${begin}for chunk in answer:\n    if chunk.choices:\n        print(${part} or "", end="", flush=True)\n`;
}

/** @param {any} value @param {number} indent @returns {string} */
function pythonValue(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = " ".repeat(indent + 4);
  const entries = Array.isArray(value) ? value.map((one) => pythonValue(one, indent + 4)) : Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${pythonValue(one, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  return entries.length ? `${open}\n${pad}${entries.join(`,\n${pad}`)},\n${" ".repeat(indent)}${close}` : open + close;
}
