// Owns the page of one bench: what was measured, its cells, its curves, going on with it and removing it.

import { ADMIN } from "../api.js";
import { fileCommand, removed, resumed, useBench, USED } from "../components/bench_actions.js";
import { BenchState, Cells, Curves, LoadsAndFormats } from "../components/bench_figures.js";
import { Check } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { html, useState } from "../lib.js";
import { go, to } from "../router.js";
import { decimal, gib, moment, UNKNOWN } from "../units.js";

/** @param {{id: string}} props */
export function Result({ id }) {
  const { answer, problem, busy } = useBench(id);
  const running = answer?.state === "running";
  return html`<section class="page">
    <div class="page-head"><h1>${id}</h1>${answer && html`<${BenchState} state=${answer.state} />`}<a href=${to("bench")}>All benches</a></div>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`
      ${answer.error && html`<p class="error">${answer.error}</p>`}
      ${!running && html`<${Actions} result=${answer} />`}
      <${About} result=${answer} />
      ${answer.cells.length > 0 && html`<section><h2>Cells</h2><${Cells} result=${answer} /></section>
        ${!running && html`<${Curves} result=${answer} />`}`}
      <${LoadsAndFormats} result=${answer} />
      ${answer.published.length > 0 && html`<${Published} result=${answer} />`}`}
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
