// All figures of one bench, one below the other, as its page and its report show them.

import { html, signal, useMemo } from "../lib.js";
import { decimal, gib, moment, UNKNOWN, watts } from "../units.js";
import { Cells, Curves, LoadsAndFormats } from "./bench_figures.js";
import { Chart } from "./chart.js";

/** @param {{result: any}} props */
export const Figures = ({ result }) => html`
  ${result.error && html`<p class="error">${result.error}</p>`}
  <${About} result=${result} />
  ${result.cells.length > 0 && html`<section><h2>Cells</h2><${Cells} result=${result} /></section>
    ${result.state !== "running" && html`<${Curves} result=${result} />`}`}
  ${result.state !== "running" && result.samples.length > 0 && html`<${OverTime} result=${result} />`}
  <${LoadsAndFormats} result=${result} />
  ${result.published.length > 0 && html`<${Published} result=${result} />`}`;

/** Power and memory, with idle power and the planned memory as lines across. @param {{result: any}} props */
function OverTime({ result }) {
  const { power, memory } = useMemo(() => {
    const times = result.samples.map((/** @type {any} */ one) => result.started_s + one.at_s);
    const over = (/** @type {string} */ key) => signal([times, result.samples.map((/** @type {any} */ one) => one[key] ?? null)]);
    return { power: over("power_w"), memory: over("memory_bytes") };
  }, [result]);
  const idle = result.idle_w == null ? [] : [{ label: "idle", value: result.idle_w }];
  const planned = result.predicted_bytes == null ? [] : [{ label: "predicted", value: result.predicted_bytes }];
  // A node that serves with its CPU has no meter.
  const metered = result.samples.some((/** @type {any} */ one) => one.power_w != null);
  return html`<section><h2>${metered ? "Power and memory" : "Memory"} over time</h2>
    <div class="charts">
      ${metered && html`<${Chart} title="Power of the GPUs" series=${[{ label: "power", colour: "--series-2" }]} data=${power} text=${watts} marks=${idle} />`}
      <${Chart} title="Memory of the engine" series=${[{ label: "memory", colour: "--series-1" }]} data=${memory} text=${gib} marks=${planned} />
    </div></section>`;
}

/** @param {{result: any}} props */
function About({ result }) {
  const { subject } = result;
  /** @type {number[]} */
  const peaks = result.cells.map((/** @type {any} */ one) => one.machine.memory_peak_bytes).filter((/** @type {any} */ bytes) => bytes != null);
  /** @type {[string, any][]} */
  const facts = [
    ["Model", subject.model],
    ["Format", subject.format ?? "as stored"],
    ["Profile", result.profile],
    ["Tool", result.tool],
    ["Text", result.text ?? UNKNOWN],
    ["vLLM", subject.vllm ?? UNKNOWN],
    ["GPU", subject.gpu ?? "no GPU"],
    ["Driver", subject.driver ?? UNKNOWN],
    ["Nodes", subject.nodes.join(", ") || UNKNOWN],
    ["Idle power", result.idle_w == null ? UNKNOWN : `${decimal(result.idle_w)} W`],
    ["Memory peak", peaks.length ? gib(Math.max(...peaks)) : UNKNOWN],
    ["Predicted memory", gib(result.predicted_bytes)],
    ["Predicted decode", result.predicted?.decode_tokens_per_s ? `${decimal(result.predicted.decode_tokens_per_s)} tokens/s` : UNKNOWN],
    ["Began", moment(result.started_s)],
    ["Ended", moment(result.ended_s)],
  ];
  return html`<dl class="figures wide-figures">${facts.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>`;
}

/** @param {{result: any}} props */
const Published = ({ result }) => html`<section><h2>Published elsewhere</h2>
  <ul class="notes">${result.published.map((/** @type {any} */ one) => html`<li key=${one.what + one.value + one.when}>${one.what}: <b class="figure">${decimal(one.value)}${one.to === null ? "" : ` to ${decimal(one.to)}`}</b> ${one.unit}${one.when ? ` (${one.when})` : ""}, ${one.source}</li>`)}</ul></section>`;
