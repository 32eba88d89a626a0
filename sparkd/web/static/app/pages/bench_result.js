// The page of one bench: what was measured, its cells, its curves, going on with it and removing it.

import { ADMIN } from "../api.js";
import { fileCommand, removed, resumed, useBench, USED } from "../components/bench_actions.js";
import { BenchState } from "../components/bench_figures.js";
import { Figures } from "../components/bench_report.js";
import { Check } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { html, useState } from "../lib.js";
import { go, to } from "../router.js";

/** @param {{id: string}} props */
export function Result({ id }) {
  const { answer, problem, busy } = useBench(id);
  const running = answer?.state === "running";
  return html`<section class="page">
    <div class="page-head"><h1>${id}</h1>${answer && html`<${BenchState} state=${answer.state} />`}<a href=${to("bench")}>All benches</a></div>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`
      ${!running && html`<${Actions} result=${answer} />`}
      <${Figures} result=${answer} />`}
  </section>`;
}

/** @param {{result: any}} props */
function Actions({ result }) {
  const [force, setForce] = useState(false);
  const { answer } = useAnswer(`${ADMIN}/bench/profiles`);
  const command = answer && fileCommand(result, answer.profiles.map((/** @type {any} */ one) => one.name));
  const complete = result.cells.every((/** @type {any} */ one) => one.state === "done") && result.quality.every((/** @type {any} */ one) => one.perplexity != null);
  const forget = async () => (await removed(result.id, result.subject.model)) && go("bench");
  return html`<div class="actions">
    ${!complete && command === null && html`<button type="button" class="main" onClick=${() => resumed(result, force)}>Resume</button><${Check} label=${USED} checked=${force} onChange=${setForce} />`}
    <button type="button" onClick=${forget}>Remove</button>
    ${!complete && command && html`<p>It measures with a file of yours. To go on: <code>${command}</code></p>`}
  </div>`;
}
