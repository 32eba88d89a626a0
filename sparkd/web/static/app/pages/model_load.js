// The tab of a model's last start: its phases one below the other over time.

import { modelPath } from "../api.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { isStarting } from "../components/state.js";
import { Table } from "../components/table.js";
import { html } from "../lib.js";
import { models, now } from "../store.js";
import { bandwidth, moment, percent, seconds, size } from "../units.js";

/** The picture's own units, which are stretched to the width of the page. */
const WIDTH = 1000;
const BAR = 16;

/**
 * takes_s: of a phase that runs, so far.
 * @typedef {{name: string, begin_s: number, seconds: number | null, takes_s: number, bytes: number | null, bytes_per_s: number | null}} Phase
 */

/** @param {{name: string}} props */
export function ModelLoad({ name }) {
  // A start's phases change with its states.
  const model = models.of(name).value;
  const starting = isStarting(model);
  const { answer, problem, busy } = useAnswer(modelPath(name, "/start"), `${model?.state} ${model?.generation} ${starting ? Math.floor(now.value / 2) : ""}`);
  if (!answer) return html`<${Waiting} problem=${problem} busy=${busy} empty=${true} />`;
  if (!answer.phases.length) return html`<p class="quiet-text">No start of this model is kept.</p>`;
  const sofarS = Math.max(0, now.value - answer.began_s);
  /** @type {Phase[]} */
  const phases = answer.phases.map((/** @type {Phase} */ phase) => ({ ...phase, takes_s: phase.seconds ?? Math.max(0, sofarS - phase.begin_s) }));
  const running = phases.find((phase) => phase.seconds === null);
  const wholeS = Math.max(answer.seconds ?? sofarS, 0.001);
  const began = html`The start of ${moment(answer.began_s)}`;
  return html`<div class="stack">
    <${Waiting} problem=${problem} busy=${busy} empty=${false} />
    <p>${answer.ended
      ? html`${began} ended in ${answer.ended}; it took <b class="figure">${seconds(wholeS)}</b>.`
      : html`${began} goes on: <b class="figure">${seconds(wholeS)}</b> so far${running && html`, <b>${running.name}</b> for <b class="figure">${seconds(running.takes_s)}</b>`}.`}
    ${answer.disk_bytes_per_s ? html` The disk reads <span class="figure">${bandwidth(answer.disk_bytes_per_s)}</span>.` : ""}</p>
    <div class="panel"><${Waterfall} phases=${phases} wholeS=${wholeS} /></div>
    <${Table} label="Phases of the start" rows=${phases} columns=${columnsFor(answer.disk_bytes_per_s, wholeS)} rowKey=${(/** @type {Phase} */ phase) => phase.name} />
  </div>`;
}

/** A line for each phase: its name, its place in the whole, its seconds. @param {{phases: Phase[], wholeS: number}} props */
function Waterfall({ phases, wholeS }) {
  return html`<ul class="waterfall" aria-label="Phases over time">
    ${phases.map((phase, row) => html`<li key=${phase.name}>
      <span>${phase.name}</span>
      <svg aria-hidden="true" viewBox="0 0 ${WIDTH} ${BAR}" preserveAspectRatio="none">
        <rect class="part engine-${row % 6}${phase.seconds === null ? " running" : ""}" x=${Math.min(WIDTH - 3, (phase.begin_s / wholeS) * WIDTH)} width=${Math.max(3, (phase.takes_s / wholeS) * WIDTH)} height=${BAR} />
      </svg>
      <span class="figure end">${seconds(phase.takes_s)}</span>
    </li>`)}
  </ul>`;
}

/** @param {number | null} diskBytesPerS @param {number} wholeS @returns {import("../components/table.js").Column<Phase>[]} */
function columnsFor(diskBytesPerS, wholeS) {
  return [
    { head: "Phase", name: true, cell: (phase) => phase.name },
    { head: "Begins", end: true, cell: (phase) => seconds(phase.begin_s) },
    { head: "Takes", end: true, value: (phase) => phase.takes_s, cell: (phase) => (phase.seconds == null ? `${seconds(phase.takes_s)} so far` : seconds(phase.seconds)) },
    { head: "Share", end: true, cell: (phase) => percent(phase.takes_s / wholeS) },
    { head: "Bytes", end: true, value: (phase) => phase.bytes, cell: (phase) => size(phase.bytes) },
    { head: "Rate", end: true, value: (phase) => phase.bytes_per_s, cell: (phase) => bandwidth(phase.bytes_per_s) },
    ...(diskBytesPerS ? [{ head: "Of the disk", end: true, cell: (/** @type {Phase} */ phase) => percent(phase.bytes_per_s ? phase.bytes_per_s / diskBytesPerS : null) }] : []),
  ];
}
