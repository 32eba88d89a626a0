// How the answer of a plan looks, as `sparkd plan` prints it: the options, a node's memory as a bar, the entry, the commands.

import { html } from "../lib.js";
import { count, duration, gib, plural, UNKNOWN } from "../units.js";
import { entryText } from "../yaml.js";
import { Bar } from "./bar.js";
import { Copy } from "./copy.js";
import { Table } from "./table.js";

/** The parts of a node's memory, in the order of the bar, with the words of sparkd/render/plan.py. @type {[string, string][]} */
const SEGMENTS = [
  ["system", "system"],
  ["weights", "weights"],
  ["kv", "KV cache"],
  ["peak", "largest batch"],
  ["graphs", "CUDA graphs"],
  ["context", "CUDA context"],
  ["processes", "processes"],
  ["margin", "margin"],
  ["upper", "reserve for an uncertain estimate"],
  ["withheld", "beyond the entry's limit"],
  ["free", "free"],
];

/** @param {number} nodes @param {string} name of the hardware; `node` is the one that the daemon runs on */
const machineOf = (nodes, name) => (name !== "node" ? `${nodes > 1 ? `${nodes} x ` : ""}${name}` : nodes > 1 ? `${nodes} nodes like this one` : "this node");
/** @param {any} option */
const formatOf = (option) => (option.prequantized ? `${option.prequantized} (${option.model.split("/").pop()})` : option.format);
/** @param {any} option */
const splitOf = (option) => [option.tensor_parallel > 1 && `TP=${option.tensor_parallel}`, option.pipeline_parallel > 1 && `PP=${option.pipeline_parallel}`].filter(Boolean).join(" ") || UNKNOWN;
/** @param {number | null} seconds */
const loadTime = (seconds) => (seconds == null ? UNKNOWN : seconds < 1 ? "<1s" : duration(seconds));
/** @param {any} parts */
const restOf = (parts) => ["peak", "graphs", "context", "processes"].reduce((sum, name) => sum + parts[name], 0);
/** @param {any} parts */
const cacheOf = (parts) => {
  const upper = parts.kv + (parts.upper_kv ?? parts.upper);
  return gib(parts.kv) === gib(upper) ? gib(parts.kv) : `${gib(parts.kv)} (< ${gib(upper)})`;
};

/** @type {import("./table.js").Column<any>[]} */
const COLUMNS = [
  { head: "Format", name: true, value: formatOf, cell: formatOf },
  { head: "Nodes", end: true, value: (option) => option.nodes, cell: (option) => count(option.nodes) },
  { head: "Split", cell: splitOf },
  { head: "Sure", cell: (option) => option.footprint.sureness },
  { head: "Weights", end: true, value: (option) => option.footprint.weights, cell: (option) => gib(option.footprint.weights) },
  { head: "KV cache", end: true, value: (option) => option.footprint.kv, cell: (option) => cacheOf(option.footprint) },
  { head: "Rest", end: true, cell: (option) => gib(restOf(option.footprint)) },
  { head: "Free", end: true, value: (option) => option.footprint.free, cell: (option) => gib(option.footprint.free) },
  { head: "Context", end: true, value: (option) => option.max_model_len, cell: (option) => count(option.max_model_len) },
  { head: "Tokens/s", end: true, hint: "upper bound for one request, from memory bandwidth", value: (option) => option.footprint.decode_tokens_s, cell: (option) => (option.footprint.decode_tokens_s ? `< ${count(option.footprint.decode_tokens_s)}` : UNKNOWN) },
  { head: "First load", end: true, value: (option) => option.footprint.first_load_s, cell: (option) => loadTime(option.footprint.first_load_s) },
  { head: "Next", end: true, value: (option) => option.footprint.next_load_s, cell: (option) => loadTime(option.footprint.next_load_s) },
];

/** @param {{answer: any}} props of POST plan */
export function Fit({ answer }) {
  const fitting = answer.options.filter((/** @type {any} */ option) => option.fits);
  const refused = answer.options.filter((/** @type {any} */ option) => !option.fits);
  const asked = answer.asked;
  const stored = answer.quantization ? `${answer.quantization}, ` : "";
  const length = asked.max_model_len ? `of ${count(asked.max_model_len)} tokens` : "of as many tokens as fit";
  return html`<div class="stack">
    <p><b>${answer.model}</b>: ${answer.architecture}, ${answer.layers} layers, ${stored}${gib(answer.bytes)} on disk, up to ${count(answer.max_len)} tokens</p>
    <p class="quiet-text">On ${machineOf(asked.nodes, answer.hardware.name)} with ${gib(answer.hardware.memory_bytes)}, ${plural(asked.requests, "request")} at once ${length}${asked.speculative ? `, drafting by ${asked.speculative}` : ""}.</p>
    ${answer.refusal && html`<p class="error" role="alert">${answer.refusal.message}</p>`}
    ${fitting.length > 0 && html`<${Table} label="What fits" rows=${fitting} columns=${COLUMNS} rowKey=${(/** @type {any} */ option) => `${formatOf(option)} ${option.nodes} ${splitOf(option)}`} />`}
    ${answer.choice?.footprint && html`<${NodeBar} choice=${answer.choice} />`}
    ${refused.length > 0 && html`<details><summary>${plural(refused.length, "way")} that ${refused.length === 1 ? "does" : "do"} not fit</summary>
      <ul class="notes">${refused.map((/** @type {any} */ option, /** @type {number} */ place) => html`<li key=${place}>${formatOf(option)} on ${plural(option.nodes, "node")}${splitOf(option) === UNKNOWN ? "" : ` (${splitOf(option)})`}: ${option.reason}.</li>`)}</ul>
    </details>`}
    ${answer.notes.map((/** @type {string} */ note) => html`<p key=${note} class="quiet-text">${note}</p>`)}
  </div>`;
}

/** @param {{choice: any}} props */
function NodeBar({ choice }) {
  const parts = choice.footprint;
  const segments = SEGMENTS.map(([kind, label]) => ({ kind, label, bytes: Math.max(0, parts[kind] ?? 0) }));
  return html`<div class="stack">
    <h3>Each node's memory with ${formatOf(choice)}</h3>
    <${Bar} label="Memory of a node" total=${Math.max(parts.memory, segments.reduce((sum, part) => sum + part.bytes, 0))} segments=${segments} />
    <p class="quiet-text">${parts.kv_bytes_per_token ? `${(parts.kv_bytes_per_token / 1024).toFixed(1)} KiB of cache for a token` : "no cache"}, ${gib(parts.load_peak)} at the peak of a load${parts.disk ? `, ${gib(parts.disk)} of disk to keep it quantized` : ""}.</p>
  </div>`;
}

/** The entry and the commands of a plan's choice. @param {{answer: any}} props */
export function Choice({ answer }) {
  const choice = answer.choice;
  if (!choice) return null;
  const entry = choice.config && !choice.configured ? entryText(choice.name, choice.config) : "";
  return html`<div class="stack">
    ${entry && html`<div class="page-head"><h3>In sparkd.yaml</h3><${Copy} text=${entry} label="Copy entry" /></div><pre>${entry}</pre>`}
    ${choice.configured && Object.keys(choice.config ?? {}).length > 0 && html`<h3>Keys that are auto in the entry of ${choice.name} become</h3>
      <pre>${Object.entries(choice.config).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join("\n")}</pre>`}
    ${choice.ranks.length > 0 && html`<details><summary>The command that sparkd then runs</summary>
      ${choice.ranks.map((/** @type {any} */ rank) => html`<pre key=${rank.node}>${choice.ranks.length > 1 ? `# node ${rank.node}\n` : ""}${commandOf(rank)}</pre>`)}
    </details>`}
  </div>`;
}

/** @param {{environment: Record<string, string>, command: string[]}} rank */
const commandOf = (rank) => [...Object.entries(rank.environment).map(([name, value]) => `${name}=${quoted(value)}`), ...rank.command.map(quoted)].join(" ");
/** A word for a POSIX shell. @param {string} word */
export const quoted = (word) => (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);

