// The playground: what is asked of one model or of two, once or n times at once. It is kept until the tab is closed.

import { access } from "../api.js";
import { Copy } from "../components/copy.js";
import { Field } from "../components/form.js";
import { Conversation } from "../components/talk.js";
import { html, signal, useMemo } from "../lib.js";
import { curlText, pythonText, Run } from "../openai.js";
import { models } from "../store.js";
import { useOpenModels } from "./open_models.js";

const MOST_STREAMS = 64;
/** @type {[string, string][]} */
const MODES = [["chat", "Chat"], ["completion", "Completion"], ["embeddings", "Embeddings"], ["rerank", "Rerank"]];

const mode = signal("chat");
/** One model, or two side by side. */
const chosen = signal(/** @type {[string, string]} */ (["", ""]));
const text = signal("");
const documents = signal("");
const images = signal(/** @type {{name: string, url: string}[]} */ ([]));
const settings = signal(/** @type {Record<string, string>} */ ({ system: "", max_tokens: "512", temperature: "", streams: "1", tools: "" }));
const problems = signal(/** @type {Record<string, string>} */ ({}));
/** The messages of each side, which both begin with the same. @type {Signal<any[]>[]} */
const talks = [signal([]), signal([])];
/** The runs of the last request of each side. @type {Signal<Run[]>[]} */
const runs = [signal([]), signal([])];

/** The known models, by whichever API the key opens. @returns {string[]} */
function useNames() {
  const narrow = access.value === "inference";
  const { some } = useOpenModels(narrow);
  return narrow ? some.map((model) => model.id) : models.keys.value;
}

/** @param {string} name */
const setting = (name) => settings.value[name] ?? "";
const set = (/** @type {string} */ name) => (/** @type {string} */ value) => (settings.value = { ...settings.value, [name]: value });

/** The numbers and tools of the settings, or null with the problems at their fields. */
function fields() {
  /** @type {Record<string, string>} */
  const wrong = {};
  /** @type {Record<string, any>} */
  const body = {};
  for (const name of ["max_tokens", "temperature"]) {
    if (!setting(name).trim()) continue;
    body[name] = Number(setting(name));
    if (!Number.isFinite(body[name])) wrong[name] = "That is no number.";
  }
  const streams = Number(setting("streams") || 1);
  if (!Number.isInteger(streams) || streams < 1 || streams > MOST_STREAMS) wrong.streams = `Give a whole number from 1 to ${MOST_STREAMS}.`;
  if (mode.value === "chat" && setting("tools").trim()) {
    try {
      body.tools = JSON.parse(setting("tools"));
    } catch (error) {
      wrong.tools = `That is no JSON: ${error instanceof Error ? error.message : error}`;
    }
  }
  problems.value = wrong;
  return Object.keys(wrong).length ? null : { body, streams };
}

/** @param {number} side @param {Record<string, any>} numbers @param {any[]} messages */
function bodyOf(side, numbers, messages) {
  const model = chosen.value[side];
  const lines = (/** @type {string} */ some) => some.split("\n").filter((line) => line.trim());
  if (mode.value === "embeddings") return { model, input: lines(text.value) };
  if (mode.value === "rerank") return { model, query: text.value, documents: lines(documents.value) };
  const stream = { ...numbers, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (mode.value === "completion") return { model, prompt: text.value, ...stream };
  const system = setting("system").trim() ? [{ role: "system", content: setting("system") }] : [];
  // The reasoning is shown here, and not sent back.
  return { model, messages: [...system, ...messages.map(({ reasoning: _shown, ...message }) => message)], ...stream };
}

const sides = () => (chosen.value[1] ? [0, 1] : [0]);
const busy = () => sides().some((side) => runs[side]?.value.some((run) => run.state.value === "running"));

/** What the user says now, with its pictures. */
function ownMessage() {
  if (!images.value.length) return { role: "user", content: text.value };
  return { role: "user", content: [{ type: "text", text: text.value }, ...images.value.map((image) => ({ type: "image_url", image_url: { url: image.url } }))] };
}

/** A conversation without a last question that got no answer: what was refused would be refused again, and some models take no two in a row. @param {any[]} messages */
const answered = (messages) => (messages[messages.length - 1]?.role === "user" ? messages.slice(0, -1) : messages);

/** @param {any[] | null} more messages for one side, such as results of tools; null for what stands in the form @param {number[]} [only] */
function send(more, only) {
  const read = fields();
  if (!read || busy()) return;
  for (const side of only ?? sides()) {
    const talk = talks[side];
    const running = runs[side];
    if (!talk || !running) continue;
    if (mode.value === "chat") talk.value = more ? [...talk.value, ...more] : [...answered(talk.value), ownMessage()];
    const body = bodyOf(side, read.body, talk.value);
    running.value = Array.from({ length: mode.value === "chat" || mode.value === "completion" ? read.streams : 1 }, () => new Run(mode.value, body));
    const [first] = running.value;
    for (const run of running.value) run.start().then(() => run === first && keep(side, run));
  }
  if (mode.value === "chat" && !more) {
    text.value = "";
    images.value = [];
  }
}

/** The answer becomes a part of the conversation. @param {number} side @param {Run} run */
function keep(side, run) {
  const talk = talks[side];
  const running = runs[side];
  if (mode.value !== "chat" || !talk || !running || running.value.length !== 1 || run.state.value === "failed") return;
  const { text: content, reasoning, calls } = run.answer.value;
  const tools = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  talk.value = [...talk.value, { role: "assistant", content, ...(tools.length ? { tool_calls: tools } : {}), reasoning }];
}

function clear() {
  for (const side of [0, 1]) {
    for (const run of runs[side]?.value ?? []) run.stop();
    const [talk, running] = [talks[side], runs[side]];
    if (talk) talk.value = [];
    if (running) running.value = [];
  }
}

/** @param {any} event */
async function addImages(event) {
  const files = [...event.currentTarget.files];
  event.currentTarget.value = "";
  const urls = await Promise.all(files.map(dataUrl));
  images.value = [...images.value, ...urls.map((url, place) => ({ name: files[place].name, url }))];
}

/** @param {File} file @returns {Promise<string>} */
const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

export function Playground() {
  const names = useNames();
  // The model that serves already is the first choice.
  const first = useMemo(() => names.find((name) => models.of(name).peek()?.state === "READY") ?? names[0] ?? "", [names.join("|")]);
  if (first && !names.includes(chosen.value[0])) chosen.value = [first, chosen.value[1]];
  const working = busy();
  const now = mode.value;
  const choose = (/** @type {number} */ side) => (/** @type {string} */ name) => (chosen.value = side === 0 ? [name, chosen.value[1]] : [chosen.value[0], name]);
  return html`<section class="page">
    <div class="page-head"><h1>Playground</h1>
      <div class="actions" role="group" aria-label="Kind of request">${MODES.map(([one, label]) => html`<button type="button" key=${one} aria-pressed=${now === one ? "true" : "false"} onClick=${() => (clear(), (mode.value = one))}>${label}</button>`)}</div>
    </div>
    <div class="fields">
      <${Field} label="Model" value=${chosen.value[0]} onInput=${choose(0)} options=${names.length ? names : [["", "no model is known"]]} />
      <${Field} label="Compare with" value=${chosen.value[1]} onInput=${choose(1)} options=${[["", "nothing"], ...names.map((name) => [name, name])]} />
      ${(now === "chat" || now === "completion") && html`
        <${Field} label="Streams at once" value=${setting("streams")} onInput=${set("streams")} error=${problems.value.streams} type="number" min=${1} max=${MOST_STREAMS} />
        <${Field} label="Most tokens" value=${setting("max_tokens")} onInput=${set("max_tokens")} error=${problems.value.max_tokens} />
        <${Field} label="Temperature" value=${setting("temperature")} onInput=${set("temperature")} error=${problems.value.temperature} placeholder="the model's" />`}
    </div>
    ${now === "chat" && html`<details><summary>System prompt and tools</summary><div class="form">
      <${Field} label="System prompt" value=${setting("system")} onInput=${set("system")} rows=${2} />
      <${Field} label="Tools, JSON" value=${setting("tools")} onInput=${set("tools")} error=${problems.value.tools} rows=${4} mono placeholder='[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]' />
    </div></details>`}
    <div class="sides">
      ${sides().map((side) => html`<${Conversation} key=${side} model=${chosen.value[side]} mode=${now} talk=${talks[side]} runs=${runs[side]} answerTools=${(/** @type {any[]} */ results) => send(results, [side])} />`)}
    </div>
    <form class="panel" onSubmit=${(/** @type {Event} */ event) => (event.preventDefault(), send(null))}>
      <${Field} label=${now === "embeddings" ? "Texts, one a line" : now === "rerank" ? "Query" : now === "completion" ? "Text to go on from" : "Message"} value=${text.value} onInput=${(/** @type {string} */ value) => (text.value = value)} rows=${now === "rerank" ? 2 : 4} required />
      ${now === "rerank" && html`<${Field} label="Documents, one a line" value=${documents.value} onInput=${(/** @type {string} */ value) => (documents.value = value)} rows=${5} required />`}
      ${images.value.length > 0 && html`<ul class="actions">${images.value.map((image, place) => html`<li key=${place}><img class="thumbnail" src=${image.url} alt=${image.name} /><button type="button" class="quiet" aria-label="Remove ${image.name}" onClick=${() => (images.value = images.value.filter((_, other) => other !== place))}>✕</button></li>`)}</ul>`}
      <div class="actions">
        ${working ? html`<button type="button" class="danger" onClick=${() => runs.forEach((side) => side.value.forEach((run) => run.stop()))}>Stop</button>` : html`<button class="main" disabled=${!chosen.value[0]}>Send</button>`}
        ${now === "chat" && html`<label class="button">Add picture<input type="file" accept="image/*" multiple class="offscreen" onChange=${addImages} /></label>`}
        <button type="button" onClick=${clear}>Clear</button>
        <${Copy} label="Copy as curl" text=${() => curlText(now, sample())} />
        <${Copy} label="Copy as Python" text=${() => pythonText(now, sample())} />
      </div>
    </form>
  </section>`;
}

/** The request that stands in the form, or the last one. */
function sample() {
  const last = runs[0]?.value[0];
  if (last && !text.value) return last.body;
  const { body = {} } = fields() ?? {};
  return bodyOf(0, body, [...(talks[0]?.value ?? []), ownMessage()]);
}
