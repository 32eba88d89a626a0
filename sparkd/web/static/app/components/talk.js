// One side of the playground: what a model was asked, its answers as they come, and how fast they come.

import { html, useComputed, useEffect, useRef, useState } from "../lib.js";
import { speedOf } from "../openai.js";
import { models } from "../store.js";
import { count, rate, seconds, tokensPerS } from "../units.js";
import { Start, State, Word } from "./state.js";
import { Table } from "./table.js";

/** @typedef {import("../openai.js").Run} Run */

/** @param {{model: string, mode: string, talk: Signal<any[]>, runs: Signal<Run[]>, answerTools: (messages: any[]) => void}} props */
export function Conversation({ model, mode, talk, runs, answerTools }) {
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const some = runs.value;
  const messages = talk.value;
  const [only] = some;
  const kept = messages[messages.length - 1]?.role === "assistant";
  useEffect(() => {
    if (list.current) list.current.scrollTop = list.current.scrollHeight;
  }, [messages.length]);
  const calls = (kept && !some.some((run) => run.state.value === "running") && messages[messages.length - 1].tool_calls) || [];
  return html`<section class="panel" aria-label="Answers of ${model}">
    <div class="page-head"><h2>${model || "No model"}</h2><${ModelState} name=${model} waiting=${some.some((run) => run.state.value === "running" && run.answer.value.firstS === null)} /></div>
    <div class="talk" ref=${list} tabindex="0" role="log" aria-live="off" aria-label="Conversation with ${model}">
      ${mode === "chat" && messages.map((message, place) => html`<${Message} key=${place} message=${message} />`)}
      ${some.length === 1 && only && (mode === "chat" || mode === "completion") && !(mode === "chat" && kept) && html`<${Answer} run=${only} />`}
      ${some.length === 1 && only && mode === "embeddings" && html`<${Embeddings} run=${only} />`}
      ${some.length === 1 && only && mode === "rerank" && html`<${Ranks} run=${only} />`}
      ${calls.length > 0 && html`<${ToolResults} calls=${calls} onSend=${answerTools} />`}
    </div>
    ${some.length > 1 && html`<${Streams} runs=${some} />`}
    ${some.length === 1 && only && html`<${Speed} run=${only} />`}
  </section>`;
}

/** The state of the model, and how far a load is that an answer waits for. @param {{name: string, waiting: boolean}} props */
function ModelState({ name, waiting }) {
  const model = models.of(name).value;
  if (!model) return null;
  return html`<${State} model=${model} />${waiting && model.state !== "READY" && html`<div class="state-more">${model.message ? html`<span class="quiet-text" role="status">${model.message}</span>` : html`<${Start} name=${name} model=${model} />`}</div>`}`;
}

/** @param {{message: any}} props */
function Message({ message }) {
  const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content ?? [];
  return html`<article class="message ${message.role}" aria-label=${message.role}>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} open=${false} />`}
    ${parts.map((/** @type {any} */ part, /** @type {number} */ place) => (part.type === "text" ? html`<span key=${place}>${part.text}</span>` : html`<img key=${place} src=${part.image_url.url} alt="Picture that was sent" />`))}
    ${(message.tool_calls ?? []).map((/** @type {any} */ call) => html`<${Call} key=${call.id} name=${call.function.name} arguments=${call.function.arguments} />`)}
  </article>`;
}

/** @param {{run: Run}} props */
function Answer({ run }) {
  const answer = run.answer.value;
  return html`<article class="message assistant" aria-label="assistant" aria-busy=${run.state.value === "running" ? "true" : "false"}>
    ${answer.reasoning && html`<${Reasoning} text=${answer.reasoning} open=${true} />`}<span>${answer.text}</span>
    ${answer.calls.map((call) => html`<${Call} key=${call.id} name=${call.name} arguments=${call.arguments} />`)}
    ${run.problem.value && html`<p class="error" role="alert">${run.problem.value}</p>`}
  </article>`;
}

/** @param {{text: string, open: boolean}} props */
const Reasoning = ({ text, open }) => html`<details open=${open}><summary>Reasoning</summary><div class="reasoning">${text}</div></details>`;

/** @param {{name: string, arguments: string}} props */
const Call = ({ name, arguments: given }) => html`<p class="call"><${Word} word="tool" tone="idle" /> <code>${name}(${given})</code></p>`;

/** @param {{calls: any[], onSend: (messages: any[]) => void}} props */
function ToolResults({ calls, onSend }) {
  const [results, setResults] = useState(/** @type {Record<string, string>} */ ({}));
  const send = (/** @type {Event} */ event) => {
    event.preventDefault();
    onSend(calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: results[call.id] ?? "" })));
  };
  return html`<form onSubmit=${send}>
    ${calls.map((call) => html`<label key=${call.id}>Result of ${call.function.name}<input value=${results[call.id] ?? ""} onInput=${(/** @type {any} */ event) => setResults({ ...results, [call.id]: event.currentTarget.value })} /></label>`)}
    <div class="actions"><button>Send results</button></div>
  </form>`;
}

/** @param {{run: Run}} props */
function Speed({ run }) {
  const answer = run.answer.value;
  const usage = run.usage.value;
  const state = run.state.value;
  return html`<p class="speed figure">
    <${Word} word=${state} tone=${state === "done" ? "good" : state === "failed" ? "bad" : "busy"} />
    ${run.body.stream && html`<span>${tokensPerS(speedOf(answer))}</span><span>${count(answer.tokens)} tokens</span><span>first after ${seconds(answer.firstS)}</span>`}
    ${state !== "running" && html`<span>took ${seconds(run.tookS)}</span>`}${usage?.prompt_tokens != null && html`<span>prompt ${count(usage.prompt_tokens)}</span>`}
  </p>`;
}

/** n answers at once: each one's speed, and all of them together. @param {{runs: Run[]}} props */
function Streams({ runs }) {
  const sum = useComputed(() => runs.reduce((total, run) => total + (speedOf(run.answer.value) ?? 0), 0));
  const done = useComputed(() => runs.filter((run) => run.state.value !== "running").length);
  return html`<div class="stack">
    <p class="speed figure"><b>${rate(sum.value)} tokens/s together</b><span>${count(done.value)} of ${count(runs.length)} ended</span></p>
    <ul class="streams">${runs.map((run, place) => html`<${OneStream} key=${place} run=${run} number=${place + 1} />`)}</ul>
  </div>`;
}

/** @param {{run: Run, number: number}} props */
function OneStream({ run, number }) {
  const answer = run.answer.value;
  const state = run.state.value;
  return html`<li class="message">
    <p class="speed figure"><b>${number}</b><span>${tokensPerS(speedOf(answer))}</span><span>${count(answer.tokens)}</span><${Word} word=${state} tone=${state === "done" ? "good" : state === "failed" ? "bad" : "busy"} /></p>
    ${run.problem.value ? html`<p class="error">${run.problem.value}</p>` : html`<div class="stream">${(answer.text || answer.reasoning).slice(-400)}</div>`}
  </li>`;
}

/** @param {{run: Run}} props */
function Embeddings({ run }) {
  const vectors = /** @type {number[][]} */ ((run.whole.value?.data ?? []).map((/** @type {any} */ one) => one.embedding));
  if (run.problem.value) return html`<p class="error" role="alert">${run.problem.value}</p>`;
  if (!vectors.length) return null;
  const rows = vectors.map((vector, place) => ({ vector, place }));
  const input = run.body.input;
  return html`<p>${count(vectors[0]?.length)} numbers for each text.</p>
    <${Table} label="Similarity" rows=${rows} rowKey=${(/** @type {any} */ row) => row.place} columns=${[
      { head: "Text", name: true, cell: (/** @type {any} */ row) => input[row.place] },
      { head: "Begins with", cell: (/** @type {any} */ row) => html`<code>${row.vector.slice(0, 4).map((/** @type {number} */ one) => one.toFixed(4)).join(", ")}</code>` },
      ...vectors.map((vector, place) => ({ head: `Cosine to ${place + 1}`, end: true, cell: (/** @type {any} */ row) => cosine(row.vector, vector).toFixed(3) })),
    ]} />`;
}

/** @param {number[]} a @param {number[]} b */
function cosine(a, b) {
  const dot = (/** @type {number[]} */ x, /** @type {number[]} */ y) => x.reduce((sum, one, place) => sum + one * (y[place] ?? 0), 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b) || 1);
}

/** @param {{run: Run}} props */
function Ranks({ run }) {
  const rows = run.whole.value?.results ?? [];
  if (run.problem.value) return html`<p class="error" role="alert">${run.problem.value}</p>`;
  if (!rows.length) return null;
  return html`<${Table} label="Ranked documents" rows=${rows} rowKey=${(/** @type {any} */ row) => row.index} columns=${RANK_COLUMNS(run.body.documents)} />`;
}

/** @param {string[]} documents @returns {import("./table.js").Column<any>[]} */
const RANK_COLUMNS = (documents) => [
  { head: "Score", end: true, value: (row) => row.relevance_score, cell: (row) => row.relevance_score.toFixed(4) },
  { head: "Document", cell: (row) => html`<span class="wide-text">${row.document?.text ?? documents[row.index]}</span>` },
];
