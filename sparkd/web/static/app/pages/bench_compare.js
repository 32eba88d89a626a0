// Owns the page that sets one bench against another, figure by figure, with the daemon's own judgement.

import { ADMIN } from "../api.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { html } from "../lib.js";
import { to } from "../router.js";
import { UNKNOWN } from "../units.js";

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

/** @param {{a: string, b: string}} props */
export function Compared({ a, b }) {
  const { answer, problem, busy } = useAnswer(`${ADMIN}/bench/compare?${new URLSearchParams({ a, b })}`);
  return html`<section class="page">
    <div class="page-head"><h1>Compare</h1><a href=${to("bench", b, a)}>Swap A and B</a><a href=${to("bench")}>All benches</a></div>
    <ul class="notes">
      <li>A: <a href=${to("bench", a)}>${a}</a>${answer && ` (${answer.of[0]})`}</li>
      <li>B: <a href=${to("bench", b)}>${b}</a>${answer && ` (${answer.of[1]})`}</li>
    </ul>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`
      ${answer.differences.length > 0 && html`<section><h2>What differs besides the figures</h2><${Table} label="Differences" rows=${answer.differences} columns=${DIFFERENCES} rowKey=${(/** @type {any} */ one) => one.what} /></section>`}
      <section><h2>Figures</h2>
        <p class="quiet-text">B against A. “Within spread” is no more than both standard deviations together. “Not comparable”: in one of the cells the clock was held down, or requests of others ran.</p>
        <${Table} label="Changes" rows=${answer.changes} columns=${CHANGES} rowKey=${(/** @type {any} */ one) => `${one.where} ${one.figure}`} search="Search figures" empty="The two have no figure in common." />
      </section>
      <${Only} name="A" some=${answer.only_a} /><${Only} name="B" some=${answer.only_b} />`}
  </section>`;
}

/** @param {{name: string, some: any[]}} props */
const Only = ({ name, some }) => some.length > 0 && html`<section><h2>Only ${name} has</h2>
  <ul class="notes">${some.map((one) => html`<li key=${one.where}><b>${one.where}</b>: ${one.why}</li>`)}</ul></section>`;
