// The page that sets one bench against another.

import { ADMIN } from "../api.js";
import { Comparison } from "../components/bench_comparison.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { html } from "../lib.js";
import { to } from "../router.js";

/** @param {{a: string, b: string}} props */
export function Compared({ a, b }) {
  const { answer, problem, busy } = useAnswer(`${ADMIN}/bench/compare?${new URLSearchParams({ a, b })}`);
  return html`<section class="page">
    <div class="page-head"><h1>Compare</h1><a href=${to("bench", b, a)}>Swap A and B</a><a href=${to("bench")}>All benches</a></div>
    <ul class="notes">
      <li>A: <a href=${to("bench", a)}>${a}</a></li>
      <li>B: <a href=${to("bench", b)}>${b}</a></li>
    </ul>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`<${Comparison} comparison=${answer} />`}
  </section>`;
}
