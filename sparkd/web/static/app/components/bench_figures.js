// How the result of a bench looks: its cells as a table, its rates as curves, its loads and formats.

import { html, signal, useMemo, useState } from "../lib.js";
import { bandwidth, count, decimal, percent, plural, rate, seconds, UNKNOWN } from "../units.js";
import { Bar } from "./bar.js";
import { Chart } from "./chart.js";
import { Word } from "./state.js";
import { Table } from "./table.js";

/** @type {Record<string, string>} */
const TONES = { done: "good", running: "busy", failed: "bad", waiting: "idle", cancelled: "idle" };
/** As many lines as style.css has colours, once through and once dashed. */
const MOST_LINES = 8;
const COLOURS = 4;
const HEIGHT = 210;

/** The state of a bench or of a cell. @param {{state: string}} props */
export const BenchState = ({ state }) => html`<${Word} word=${state} tone=${TONES[state] ?? "busy"} />`;

/** As llama-benchy names its tests. @param {any} cell */
const nameOf = (cell) => `pp${cell.prompt_tokens} tg${cell.output_tokens} @ d${cell.depth} (c${cell.concurrency})`;

/** The row of the prompts themselves: with prefix caching a cell has a second one, of the context. @param {any} result of a cell */
const answerRow = (result) => result.rows.find((/** @type {any} */ row) => !row.is_context_prefill_phase);

/** A figure of llama-benchy's: its mean and its standard deviation; null for a cell that has none. @param {any} result of a cell @param {string} key @returns {{mean: number, std: number | null} | null} */
function metric(result, key) {
  const found = result.state === "done" ? answerRow(result)?.[key] : null;
  return found?.mean == null ? null : found;
}

/** @param {any} result of a cell @param {string} key */
const mean = (result, key) => metric(result, key)?.mean ?? null;

/** @param {number} value @param {number} digits */
const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** 900 ± 12 @param {any} result of a cell @param {string} key */
function rates(result, key) {
  const found = metric(result, key);
  if (!found) return UNKNOWN;
  const digits = found.mean >= 100 ? 0 : 1;
  return found.std ? `${fixed(found.mean, digits)} ± ${fixed(found.std, digits)}` : fixed(found.mean, digits);
}

/** 2.30 ± 0.12 s @param {any} result of a cell @param {string} key of milliseconds */
function times(result, key) {
  const found = metric(result, key);
  if (!found) return UNKNOWN;
  const [unit, name, digits] = /** @type {[number, string, number]} */ (found.mean < 1000 ? [1, "ms", 0] : [1000, "s", 2]);
  return found.std ? `${fixed(found.mean / unit, digits)} ± ${fixed(found.std / unit, digits)} ${name}` : `${fixed(found.mean / unit, digits)} ${name}`;
}

/** 0.312, small as it is. @param {number | null | undefined} value */
const small = (value) => (value == null ? UNKNOWN : fixed(value, 3));

/** @type {import("./table.js").Column<any>[]} */
const CELLS = [
  { head: "Cell", name: true, hint: "pp: tokens of the prompt; tg: of the answer; d: of context before it; c: requests at once", cell: (one) => html`<span class="cell-name">${nameOf(one.cell)}</span>` },
  { head: "State", cell: (one) => html`<${BenchState} state=${one.state} />${one.machine.throttled.length > 0 && html`<br /><${Word} word="throttled" tone="busy" />`}${one.others_tokens > 0 && html`<br /><${Word} word="others beside" tone="busy" />`}` },
  { head: "Prompt tokens/s", end: true, value: (one) => mean(one, "pp_throughput"), cell: (one) => rates(one, "pp_throughput") },
  { head: "Tokens/s", end: true, hint: "of all requests of the cell", value: (one) => mean(one, "tg_throughput"), cell: (one) => rates(one, "tg_throughput") },
  { head: "First token", end: true, value: (one) => mean(one, "e2e_ttft"), cell: (one) => times(one, "e2e_ttft") },
  { head: "W", end: true, hint: "mean power of the GPUs", value: (one) => one.energy?.mean_w, cell: (one) => decimal(one.energy?.mean_w) },
  { head: "J/token", end: true, hint: "of an answer, above idle", value: (one) => one.energy?.joules_per_output_token, cell: (one) => small(one.energy?.joules_per_output_token) },
  { head: "Took", end: true, value: (one) => one.seconds, cell: (one) => seconds(one.seconds) },
  { head: "Says", cell: (one) => saysOf(one) },
];

/** @param {any} result of a cell */
function saysOf(result) {
  if (result.error) return html`<span class="wide-text error">${result.error}</span>`;
  if (result.others_tokens) return html`<span class="wide-text">Requests of others ran beside it, ${count(result.others_tokens)} tokens. It is not comparable.</span>`;
  return result.machine.throttled.length ? html`<span class="wide-text">The clock was held down: ${result.machine.throttled.join(", ")}. It is not comparable.</span>` : "";
}

/** @param {{result: any}} props of a bench */
export const Cells = ({ result }) => html`<${Table} label="Cells" rows=${result.cells} columns=${CELLS} rowKey=${(/** @type {any} */ one) => result.cells.indexOf(one)} empty="This bench has no cells." />`;

/** The phases in which a load reads weights (sparkd/admin/starts.py); a plan predicts these. */
const WEIGHTS = ["read", "quantize"];

/** @param {any} load */
const weightsOf = (load) => load.phases.reduce((/** @type {number} */ sum, /** @type {any} */ phase) => sum + (WEIGHTS.includes(phase.phase) ? phase.seconds : 0), 0) || null;

/** The loads with their place, and with the plan's seconds; the other model of a swap has none. @param {any} result */
const plannedLoads = (result) => result.loads.map((/** @type {any} */ one, /** @type {number} */ place) => ({ ...one, place, predicted_s: one.way === "back" ? null : result.predicted?.[one.way === "first" ? "first_load_s" : "next_load_s"] }));

/** @type {Record<string, string>} */
const WAYS = { first: "first load", cached: "load from the quantized cache", swap: "swap from another model", back: "swap back to it" };

/** @type {import("./table.js").Column<any>[]} */
const LOADS = [
  { head: "Load", name: true, cell: (one) => WAYS[one.way] ?? one.way },
  { head: "Model", cell: (one) => one.model || UNKNOWN },
  { head: "Takes", end: true, cell: (one) => seconds(one.seconds) },
  { head: "First answer", end: true, cell: (one) => seconds(one.first_answer_s) },
  { head: "Weights", end: true, hint: "time in which they were read and quantized", cell: (one) => seconds(weightsOf(one)) },
  { head: "Predicted", end: true, hint: "by the plan, for the weights", cell: (one) => seconds(one.predicted_s) },
  { head: "Rate", end: true, cell: (one) => bandwidth(one.bytes_per_s) },
  { head: "Of the disk", end: true, cell: (one) => percent(one.bytes_per_s && one.disk_bytes_per_s ? one.bytes_per_s / one.disk_bytes_per_s : null) },
];
/** @type {import("./table.js").Column<any>[]} */
const QUALITY = [
  { head: "Format", name: true, cell: (one) => one.format },
  { head: "Perplexity", end: true, cell: (one) => small(one.perplexity) },
  { head: "KL, nats a token", end: true, cell: (one) => (one.kl == null ? UNKNOWN : fixed(one.kl, 5)) },
  { head: "KL p99", end: true, hint: "of its positions, the 99th percentile", cell: (one) => small(one.kl_p99) },
  { head: "Greedy agreement", end: true, cell: (one) => percent(one.agreement) },
  { head: "Says", cell: (one) => (one.error ? html`<span class="wide-text error">${one.error}</span>` : "") },
];

/** What a bench measured besides cells. @param {{result: any}} props */
export const LoadsAndFormats = ({ result }) => html`
  ${result.loads.length > 0 && html`<section><h2>Loads</h2><${Table} label="Loads" rows=${plannedLoads(result)} columns=${LOADS} rowKey=${(/** @type {any} */ one) => one.place} /><${Phases} loads=${result.loads} /></section>`}
  ${result.quality.length > 0 && html`<section><h2>Formats</h2><${Table} label="Formats" rows=${result.quality} columns=${QUALITY} rowKey=${(/** @type {any} */ one) => one.format} /></section>`}`;

/** Each load as a bar of its phases, all on one scale. @param {{loads: any[]}} props */
function Phases({ loads }) {
  const longest = Math.max(...loads.map((one) => one.seconds), 0.001);
  return html`<div class="stack">${loads.map((one, place) => {
    const other = one.seconds - one.phases.reduce((/** @type {number} */ sum, /** @type {any} */ phase) => sum + phase.seconds, 0);
    const segments = [...one.phases, { phase: "other", seconds: Math.max(other, 0) }].map((phase, row) => ({ kind: `engine-${row % 6}`, label: phase.phase, bytes: phase.seconds }));
    return html`<div key=${place}><p>${WAYS[one.way] ?? one.way} <span class="quiet-text">${one.model}</span></p><${Bar} label=${`Load ${place + 1}`} total=${longest} segments=${segments} text=${seconds} /></div>`;
  })}</div>`;
}

/** The figures below the axis. */
const REQUESTS = { tick: count, text: (/** @type {number | null | undefined} */ value) => (value == null ? "" : value === 1 ? "1 request" : `${count(value)} requests`) };
const DEPTH = { tick: (/** @type {number} */ value) => (value >= 1000 ? `${count(value / 1000)}k` : count(value)), text: (/** @type {number | null | undefined} */ value) => (value == null ? "" : `depth ${count(value)}`) };

/** What a curve may show: its name, its figure of a cell that was measured, and how that reads. @type {[string, (cell: any) => number | null, (value: any) => string][]} */
const SHOWN = [
  ["Tokens/s", (one) => mean(one, "tg_throughput"), rate],
  ["Prompt tokens/s", (one) => mean(one, "pp_throughput"), rate],
  ["First token", (one) => (mean(one, "e2e_ttft") ?? NaN) / 1000, seconds],
  ["J/token", (one) => one.energy?.joules_per_output_token ?? null, small],
];

/** A figure over the requests at once, and over the depth; tokens a second at first. @param {{result: any}} props */
export function Curves({ result }) {
  const [chosen, choose] = useState("Tokens/s");
  const [name, read, text] = SHOWN.find(([one]) => one === chosen) ?? /** @type {any} */ (SHOWN[0]);
  const points = useMemo(() => pointsOf(result, read), [result, name]);
  const over = [
    { title: `${name} over requests at once`, across: REQUESTS, x: "concurrency", line: "depth", lineText: DEPTH.text },
    { title: `${name} over depth`, across: DEPTH, x: "depth", line: "concurrency", lineText: REQUESTS.text },
  ].filter((one) => valuesOf(points, one.x).length > 1);
  const throttled = result.cells.filter((/** @type {any} */ one) => one.machine.throttled.length).length;
  return html`<section><div class="page-head"><h2>Curves</h2>
      <select class="slim" aria-label="Figure of the curves" value=${chosen} onChange=${(/** @type {any} */ event) => choose(event.currentTarget.value)}>${SHOWN.map(([one]) => html`<option key=${one} value=${one}>${one}</option>`)}</select></div>
    ${over.length === 0 && html`<p class="quiet-text">A curve needs this figure at two depths, or at two numbers of requests at once.</p>`}
    ${throttled > 0 && html`<p class="quiet-text">The clock was held down in ${plural(throttled, "cell")}, so ${throttled === 1 ? "its figures are" : "their figures are"} not the machine's best.</p>`}
    <div class="charts">${over.map(({ title, across, ...which }) => html`<${Curve} key=${title} title=${title} points=${points} text=${text} across=${across} ...${which} />`)}</div>
  </section>`;
}

/** @typedef {{cell: any, lengths: string, value: number}} Point */

/** The cells that have a figure. @param {any} result @param {(cell: any) => number | null} read @returns {Point[]} */
const pointsOf = (result, read) =>
  result.cells
    .map((/** @type {any} */ one) => ({ cell: one.cell, lengths: `pp${one.cell.prompt_tokens} tg${one.cell.output_tokens}`, value: one.state === "done" ? read(one) : null }))
    .filter((/** @type {any} */ point) => Number.isFinite(point.value));

/** What the points have of a property, in order, each once. @param {Point[]} points @param {string} key @returns {number[]} */
const valuesOf = (points, key) => [...new Set(points.map((point) => point.cell[key]))].sort((a, b) => a - b);

/**
 * x, line: the property of a cell along the axis, and the one that tells lines apart.
 * @param {{title: string, points: Point[], text: (value: any) => string, x: string, line: string, across: any, lineText: (value: number) => string}} props
 */
function Curve({ title, points, text, x, line, across, lineText }) {
  const { series, data } = useMemo(() => linesOf(points, x, line, lineText), [points]);
  return html`<${Chart} title=${title} series=${series} data=${data} text=${text} across=${across} height=${HEIGHT} />`;
}

/** A line for each value of a property, and for each length of prompt and answer where there are several. @param {Point[]} points @param {string} x @param {string} line @param {(value: number) => string} text */
function linesOf(points, x, line, text) {
  const places = valuesOf(points, x);
  const several = new Set(points.map((point) => point.lengths)).size > 1;
  /** @type {Map<string, (number | null)[]>} */
  const lines = new Map();
  for (const point of [...points].sort((a, b) => a.cell[line] - b.cell[line])) {
    const label = several ? `${point.lengths}, ${text(point.cell[line])}` : text(point.cell[line]);
    const column = lines.get(label) ?? places.map(() => null);
    column[places.indexOf(point.cell[x])] = point.value;
    lines.set(label, column);
  }
  const some = [...lines].slice(0, MOST_LINES);
  const series = some.map(([label], place) => ({ label, colour: `--series-${(place % COLOURS) + 1}`, dash: place >= COLOURS }));
  return { series, data: signal([places, ...some.map(([, column]) => column)]) };
}
