// The report of benches: a file that the command line writes, with these modules and the figures inside.

import { BenchState } from "./components/bench_figures.js";
import { Comparison } from "./components/bench_comparison.js";
import { Figures } from "./components/bench_report.js";
import { Table } from "./components/table.js";
import { html, render } from "./lib.js";

/** @typedef {{title: string, head: string[], rows: string[][]}} TextTable */

/** The figures below those that have a picture, as the Markdown has them. @param {TextTable} props */
function Plain({ title, head, rows }) {
  const columns = head.map((name, place) => ({ head: name, name: place === 0, cell: (/** @type {string[]} */ row) => row[place] }));
  return html`<section><h2>${title}</h2><${Table} label=${title} rows=${rows} columns=${columns} rowKey=${(/** @type {string[]} */ row) => rows.indexOf(row)} /></section>`;
}

/** @param {{title: string, comparison: any, benches: {result: any, tables: TextTable[]}[]}} props */
const Report = ({ title, comparison, benches }) => html`
  <section class="page"><h1>${title}</h1>
    ${benches.length === 0 && html`<p>There are no results.</p>`}
    ${comparison && html`<p>A: ${comparison.of[0]}. B: ${comparison.of[1]}.</p><${Comparison} comparison=${comparison} />`}
  </section>
  ${benches.map(({ result, tables }) => html`<section class="page" key=${result.id}>
    <div class="page-head"><h1>${result.id}</h1><${BenchState} state=${result.state} /></div>
    <${Figures} result=${result} />
    ${tables.map((one) => html`<${Plain} key=${one.title} ...${one} />`)}
  </section>`)}`;

const place = document.getElementById("report");
const figures = document.getElementById("figures");
place?.replaceChildren();
if (place && figures) render(html`<${Report} ...${JSON.parse(figures.textContent ?? "")} />`, place);
