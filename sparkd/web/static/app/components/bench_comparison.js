// How one bench stands against another, figure by figure, with the judgement of sparkd.

import { html } from "../lib.js";
import { UNKNOWN } from "../units.js";
import { Word } from "./state.js";
import { Table } from "./table.js";

/** Of a figure's digits. */
const SIGNIFICANT = 4;

/** @param {number} value */
const short = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : Number(value.toPrecision(SIGNIFICANT)).toLocaleString("en-US", { maximumFractionDigits: 6 }));

/** @param {{mean: number, std: number | null}} metric @param {string} unit */
const withSpread = (metric, unit) => `${short(metric.mean)}${metric.std ? ` ± ${Number(metric.std.toPrecision(2)).toLocaleString("en-US")}` : ""} ${unit}`.trim();

/** +12.3% @param {number | null} relative */
const percentOf = (relative) => (relative == null ? UNKNOWN : `${relative > 0 ? "+" : relative < 0 ? "−" : ""}${Math.abs(relative * 100).toFixed(1)}%`);

/** A word and its colour. @param {any} one @returns {[string, string]} */
function verdictOf(one) {
  if (!one.comparable) return ["not comparable", "idle"];
  if (one.better == null) return ["", ""];
  if (one.beyond_spread === false) return ["within spread", "idle"];
  return one.better ? ["better", "good"] : ["worse", "bad"];
}

/** @param {{change: any}} props */
function Verdict({ change }) {
  const [word, tone] = verdictOf(change);
  return word ? html`<${Word} word=${word} tone=${tone} />` : null;
}

/** @type {import("../components/table.js").Column<any>[]} */
const DIFFERENCES = [
  { head: "Differs", name: true, cell: (one) => one.what },
  { head: "A", cell: (one) => html`<span class="wide-text">${one.a}</span>` },
  { head: "B", cell: (one) => html`<span class="wide-text">${one.b}</span>` },
];
/** @type {import("../components/table.js").Column<any>[]} */
const CHANGES = [
  { head: "Figure", name: true, value: (one) => `${one.where} ${one.figure} ${verdictOf(one)[0]}`, cell: (one) => html`${one.figure}<br /><span class="quiet-text nowrap">${one.where}</span>` },
  { head: "Change", end: true, value: (one) => one.relative, hint: "of B against A", cell: (one) => html`${percentOf(one.relative)}<br /><${Verdict} change=${one} />` },
  { head: "A", end: true, cell: (one) => withSpread(one.a, one.unit) },
  { head: "B", end: true, cell: (one) => withSpread(one.b, one.unit) },
];

/** @param {{comparison: any}} props */
export const Comparison = ({ comparison }) => html`
  ${comparison.differences.length > 0 && html`<section><h2>What differs besides the figures</h2><${Table} label="Differences" rows=${comparison.differences} columns=${DIFFERENCES} rowKey=${(/** @type {any} */ one) => one.what} /></section>`}
  <section><h2>Figures</h2>
    <p class="quiet-text">B against A. “Within spread” is no more than both standard deviations together. “Not comparable”: in one of the cells the clock was held down, or requests of others ran.</p>
    <${Table} label="Changes" rows=${comparison.changes} columns=${CHANGES} rowKey=${(/** @type {any} */ one) => `${one.where} ${one.figure}`} search="Search figures" empty="The two have no figure in common." />
  </section>
  <${Only} name="A" some=${comparison.only_a} /><${Only} name="B" some=${comparison.only_b} />`;

/** @param {{name: string, some: any[]}} props */
const Only = ({ name, some }) => some.length > 0 && html`<section><h2>Only ${name} has</h2>
  <ul class="notes">${some.map((one) => html`<li key=${one.where}><b>${one.where}</b>: ${one.why}</li>`)}</ul></section>`;
