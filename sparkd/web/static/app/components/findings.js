// The list of findings: what was looked at, the value that was read, and what fixes it.

import { html } from "../lib.js";
import { Copy } from "./copy.js";
import { Word } from "./state.js";

const ORDER = ["fail", "warn", "ok"];

/** A sentence whose `commands` look like those of a shell. @param {string} text */
const prose = (text) => text.split("`").map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));

/** @param {{findings: Finding[]}} props */
export function Findings({ findings }) {
  const bad = findings.filter((one) => one.verdict !== "ok").sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
  const good = findings.filter((one) => one.verdict === "ok");
  const list = (/** @type {Finding[]} */ some) => html`<ul class="notes">
    ${some.map((one, place) => html`<li key=${place} class="finding">
      <${Word} word=${one.verdict} /> <b>${one.node}</b> · ${one.about}: ${prose(one.evidence)}
      ${one.cure && html`<div class="cure"><span>${prose(one.cure)}</span>${one.command && html`<${Copy} text=${one.command} label="Copy command" />`}</div>`}
    </li>`)}
  </ul>`;
  return html`<div class="stack">
    ${bad.length ? list(bad) : html`<p>Nothing is wrong.</p>`}
    ${good.length > 0 && html`<details><summary>${good.length} in order</summary>${list(good)}</details>`}
  </div>`;
}
