// Owns the tab of a model's last start: its phases one below the other over time.

import { modelPath } from "../api.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Table } from "../components/table.js";
import { html } from "../lib.js";
import { models, now } from "../store.js";
import { bandwidth, moment, percent, seconds, size } from "../units.js";

const WIDTH = 1000;
const ROW = 26;
const BAR = 16;

/** @typedef {{name: string, begin_s: number, seconds: number | null, bytes: number | null, bytes_per_s: number | null}} Phase */

/** @param {{name: string}} props */
export function ModelLoad({ name }) {
  // A start's phases change with its states.
  const model = models.of(name).value;
  const starting = ["LOADING", "WARMING", "SIZING"].includes(model?.state ?? "");
  const { answer, problem, busy } = useAnswer(modelPath(name, "/start"), `${model?.state} ${model?.generation} ${starting ? Math.floor(now.value / 2) : ""}`);
  if (!answer) return html`<${Waiting} problem=${problem} busy=${busy} empty=${true} />`;
  /** @type {Phase[]} */
  const phases = answer.phases ?? [];
  if (!phases.length) return html`<p class="quiet-text">No start of this model is kept.</p>`;
  const whole = Math.max(answer.seconds ?? 0, ...phases.map((phase) => phase.begin_s + (phase.seconds ?? 0)), 0.001);
  return html`<div class="stack">
    <${Waiting} problem=${problem} busy=${busy} empty=${false} />
    <p>The start of ${moment(answer.began_s)} ${answer.ended ? `ended in ${answer.ended}; it took` : "goes on; so far"} <b class="figure">${seconds(answer.seconds ?? whole)}</b>.${answer.disk_bytes_per_s ? html` The disk reads <span class="figure">${bandwidth(answer.disk_bytes_per_s)}</span>.` : ""}</p>
    <div class="panel"><${Waterfall} phases=${phases} whole=${whole} /></div>
    <${Table} label="Phases of the start" rows=${phases} columns=${columnsFor(answer.disk_bytes_per_s, whole)} rowKey=${(/** @type {Phase} */ phase) => phase.name} />
  </div>`;
}

/** @param {{phases: Phase[], whole: number}} props */
function Waterfall({ phases, whole }) {
  const height = phases.length * ROW;
  return html`<svg class="waterfall" role="img" aria-label="Phases over time; the table below has the figures" viewBox="0 0 ${WIDTH} ${height}">
    ${phases.map((phase, row) => {
      const x = (phase.begin_s / whole) * WIDTH;
      const width = Math.max(2, ((phase.seconds ?? whole - phase.begin_s) / whole) * WIDTH);
      const inside = x > WIDTH * 0.7;
      return html`<g key=${phase.name}>
        <rect class="part engine-${row % 6}" x=${x} y=${row * ROW + (ROW - BAR) / 2} width=${width} height=${BAR} rx="3" />
        <text class="waterfall-text" x=${inside ? x - 6 : Math.min(x + width + 6, WIDTH)} y=${row * ROW + ROW / 2} dominant-baseline="central" text-anchor=${inside || x + width > WIDTH * 0.7 ? "end" : "start"}
          dx=${!inside && x + width > WIDTH * 0.7 ? -(width + 12) : 0}>${phase.name} ${seconds(phase.seconds)}</text>
      </g>`;
    })}
  </svg>`;
}

/** @param {number | null} diskBytesPerS @param {number} whole @returns {import("../components/table.js").Column<Phase>[]} */
function columnsFor(diskBytesPerS, whole) {
  return [
    { head: "Phase", name: true, cell: (phase) => phase.name },
    { head: "Begins", end: true, cell: (phase) => seconds(phase.begin_s) },
    { head: "Takes", end: true, value: (phase) => phase.seconds, cell: (phase) => (phase.seconds == null ? "running" : seconds(phase.seconds)) },
    { head: "Share", end: true, cell: (phase) => percent(phase.seconds == null ? null : phase.seconds / whole) },
    { head: "Bytes", end: true, value: (phase) => phase.bytes, cell: (phase) => size(phase.bytes) },
    { head: "Rate", end: true, value: (phase) => phase.bytes_per_s, cell: (phase) => bandwidth(phase.bytes_per_s) },
    ...(diskBytesPerS ? [{ head: "Of the disk", end: true, cell: (/** @type {Phase} */ phase) => percent(phase.bytes_per_s ? phase.bytes_per_s / diskBytesPerS : null) }] : []),
  ];
}
