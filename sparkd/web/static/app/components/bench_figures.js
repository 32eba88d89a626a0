// Owns how the result of a bench looks: its cells as a table, its rates as curves, its loads and formats.

import { html, signal, useEffect, useMemo } from "../lib.js";
import { bandwidth, count, decimal, percent, rate, seconds, UNKNOWN } from "../units.js";
import { Chart } from "./chart.js";
import { Word } from "./state.js";
import { Table } from "./table.js";

/** @type {Record<string, string>} */
const TONES = { done: "good", running: "busy", failed: "bad", waiting: "idle", cancelled: "idle" };
/** As many lines as style.css has colours, once through and once dashed. */
const MOST_LINES = 8;
const COLOURS = 4;

/** The state of a bench or of a cell. @param {{state: string}} props */
export const BenchState = ({ state }) => html`<${Word} word=${state} tone=${TONES[state] ?? "busy"} />`;

/** As llama-benchy names its tests. @param {any} cell */
const nameOf = (cell) => `pp${cell.prompt_tokens} tg${cell.output_tokens} @ d${cell.depth} (c${cell.concurrency})`;

/** The row of the prompts themselves: with prefix caching a cell has a second one, of the context. @param {any} result of a cell */
const answerRow = (result) => result.rows.find((/** @type {any} */ row) => !row.is_context_prefill_phase);

/** The mean of a figure of llama-benchy's; nothing for a cell that failed. @param {any} result of a cell @param {string} key @returns {number | null} */
const mean = (result, key) => (result.state === "done" ? answerRow(result)?.[key]?.mean ?? null : null);

/** @param {any} result of a cell @param {string} key @param {(value: any) => string} text @param {number} [unit] how many of llama-benchy's make one of ours */
function spread(result, key, text, unit = 1) {
  const metric = result.state === "done" ? answerRow(result)?.[key] : null;
  if (metric?.mean == null) return UNKNOWN;
  return metric.std ? `${text(metric.mean / unit)} ± ${text(metric.std / unit)}` : text(metric.mean / unit);
}

/** 0.312, small as it is. @param {number | null | undefined} value */
const joule = (value) => (value == null ? UNKNOWN : value.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 }));

/** @type {import("./table.js").Column<any>[]} */
const CELLS = [
  { head: "Cell", name: true, hint: "pp: tokens of the prompt; tg: of the answer; d: of context before it; c: requests at once", cell: (one) => html`<span class="nowrap">${nameOf(one.cell)}</span>` },
  { head: "State", cell: (one) => html`<${BenchState} state=${one.state} />${one.machine.throttled.length > 0 && html` <${Word} word="throttled" tone="busy" />`}` },
  { head: "Prompt tokens/s", end: true, value: (one) => mean(one, "pp_throughput"), cell: (one) => spread(one, "pp_throughput", rate) },
  { head: "Tokens/s", end: true, hint: "of all requests of the cell", value: (one) => mean(one, "tg_throughput"), cell: (one) => spread(one, "tg_throughput", rate) },
  { head: "First token", end: true, value: (one) => mean(one, "e2e_ttft"), cell: (one) => spread(one, "e2e_ttft", seconds, 1000) },
  { head: "W", end: true, hint: "mean power of the GPUs", value: (one) => one.energy?.mean_w, cell: (one) => decimal(one.energy?.mean_w) },
  { head: "J/token", end: true, hint: "of an answer, above idle", value: (one) => one.energy?.joules_per_output_token, cell: (one) => joule(one.energy?.joules_per_output_token) },
  { head: "Took", end: true, value: (one) => one.seconds, cell: (one) => seconds(one.seconds) },
  { head: "Says", cell: (one) => saysOf(one) },
];

/** @param {any} result of a cell */
function saysOf(result) {
  if (result.error) return html`<span class="wide-text error">${result.error}</span>`;
  return result.machine.throttled.length ? html`<span class="wide-text">The clock was held down: ${result.machine.throttled.join(", ")}. It is not comparable.</span>` : "";
}

/** @param {{result: any}} props of a bench */
export const Cells = ({ result }) => html`<${Table} label="Cells" rows=${result.cells} columns=${CELLS} rowKey=${(/** @type {any} */ one) => result.cells.indexOf(one)} empty="This bench has no cells." />`;

/** @type {import("./table.js").Column<any>[]} */
const LOADS = [
  { head: "Load", name: true, cell: (one) => ({ first: "first", cached: "from the quantized cache", swap: "swap from another model" })[/** @type {string} */ (one.way)] ?? one.way },
  { head: "Takes", end: true, cell: (one) => seconds(one.seconds) },
  { head: "First answer", end: true, cell: (one) => seconds(one.first_answer_s) },
  { head: "Rate", end: true, cell: (one) => bandwidth(one.bytes_per_s) },
  { head: "Of the disk", end: true, cell: (one) => percent(one.bytes_per_s && one.disk_bytes_per_s ? one.bytes_per_s / one.disk_bytes_per_s : null) },
];
/** @type {import("./table.js").Column<any>[]} */
const QUALITY = [
  { head: "Format", name: true, cell: (one) => one.format },
  { head: "Perplexity", end: true, cell: (one) => joule(one.perplexity) },
  { head: "KL, nats a token", end: true, cell: (one) => one.kl ?? UNKNOWN },
  { head: "Greedy agreement", end: true, cell: (one) => percent(one.agreement) },
];

/** What a bench measured besides cells. @param {{result: any}} props */
export const LoadsAndFormats = ({ result }) => html`
  ${result.loads.length > 0 && html`<section><h2>Loads</h2><${Table} label="Loads" rows=${result.loads} columns=${LOADS} rowKey=${(/** @type {any} */ one) => result.loads.indexOf(one)} /></section>`}
  ${result.quality.length > 0 && html`<section><h2>Formats</h2><${Table} label="Formats" rows=${result.quality} columns=${QUALITY} rowKey=${(/** @type {any} */ one) => one.format} /></section>`}`;

/** The figures below the axis. */
const REQUESTS = { tick: count, text: (/** @type {number | null | undefined} */ value) => (value == null ? "" : value === 1 ? "1 request" : `${count(value)} requests`) };
const DEPTH = { tick: (/** @type {number} */ value) => (value >= 1000 ? `${count(value / 1000)}k` : count(value)), text: (/** @type {number | null | undefined} */ value) => (value == null ? "" : `depth ${count(value)}`) };

/** Tokens a second over the requests at once, and over the depth. @param {{result: any}} props */
export function Curves({ result }) {
  const over = [
    { title: "Tokens/s over requests at once", across: REQUESTS, x: "concurrency", line: "depth", text: DEPTH.text },
    { title: "Tokens/s over depth", across: DEPTH, x: "depth", line: "concurrency", text: REQUESTS.text },
  ].filter((one) => valuesOf(result, one.x).length > 1);
  if (!over.length) return html`<p class="quiet-text">A curve needs figures at two depths, or at two numbers of requests at once.</p>`;
  return html`<div class="charts">${over.map((one) => html`<${Curve} key=${one.title} result=${result} ...${one} />`)}</div>`;
}

/** What the measured cells have of one property, in order, each once. @param {any} result @param {string} key @returns {number[]} */
const valuesOf = (result, key) =>
  [...new Set(/** @type {number[]} */ (result.cells.filter((/** @type {any} */ one) => mean(one, "tg_throughput") !== null).map((/** @type {any} */ one) => one.cell[key])))].sort((a, b) => a - b);

/**
 * x, line: the property of a cell along the axis, and the one that tells lines apart.
 * @param {{title: string, result: any, x: string, line: string, across: any, text: (value: number) => string}} props
 */
function Curve({ title, result, x, line, across, text }) {
  const { series, columns } = useMemo(() => linesOf(result, x, line, text), [result]);
  const data = useMemo(() => signal(columns), []);
  useEffect(() => {
    data.value = columns;
  }, [columns]);
  return html`<${Chart} title=${title} series=${series} data=${data} text=${rate} across=${across} />`;
}

/** A line for each value of one property, and for each length of prompt and answer where there are several. @param {any} result @param {string} x @param {string} line @param {(value: number) => string} text */
function linesOf(result, x, line, text) {
  const places = valuesOf(result, x);
  /** @type {Map<string, (number | null)[]>} */
  const lines = new Map();
  const lengths = (/** @type {any} */ cell) => `pp${cell.prompt_tokens} tg${cell.output_tokens}`;
  const several = new Set(result.cells.map((/** @type {any} */ one) => lengths(one.cell))).size > 1;
  for (const one of [...result.cells].sort((a, b) => a.cell[line] - b.cell[line])) {
    const value = mean(one, "tg_throughput");
    if (value === null) continue;
    const label = several ? `${lengths(one.cell)}, ${text(one.cell[line])}` : text(one.cell[line]);
    const column = lines.get(label) ?? places.map(() => null);
    column[places.indexOf(one.cell[x])] = value;
    lines.set(label, column);
  }
  const some = [...lines].slice(0, MOST_LINES);
  const series = some.map(([label], place) => ({ label, colour: `--series-${(place % COLOURS) + 1}`, dash: place >= COLOURS }));
  return { series, columns: [places, ...some.map(([, column]) => column)] };
}
