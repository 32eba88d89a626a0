// The tab of a checkpoint's layers: their bytes, and what becomes of each.

import { modelPath } from "../api.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { html } from "../lib.js";
import { count, percent, size, UNKNOWN } from "../units.js";

/** @type {import("../components/table.js").Column<any>[]} */
const COLUMNS = [
  { head: "Name", name: true, value: (layer) => layer.name, cell: (layer) => html`<code>${layer.name}</code>` },
  { head: "Class", value: (layer) => layer.class, cell: (layer) => layer.class },
  { head: "Count", end: true, value: (layer) => layer.count, cell: (layer) => count(layer.count) },
  { head: "Shape", end: true, cell: (layer) => layer.shape.join("x") || "1" },
  { head: "Dtype", value: (layer) => layer.dtype, cell: (layer) => layer.dtype },
  { head: "Bytes", end: true, value: (layer) => layer.bytes, cell: (layer) => size(layer.bytes) },
  { head: "Format", value: (layer) => layer.format ?? layer.refused, cell: (layer) => (layer.refused ? html`<${Word} word="not ${layer.refused}" tone="bad" />` : layer.format ?? UNKNOWN) },
  { head: "Result", end: true, value: (layer) => layer.result_bytes, cell: (layer) => size(layer.result_bytes) },
];

/** @param {{name: string}} props */
export function ModelLayers({ name }) {
  const { answer, problem, busy } = useAnswer(modelPath(name, "/layers"));
  if (!answer) return html`<${Waiting} problem=${problem} busy=${busy} empty=${true} />`;
  return html`<div class="stack">
    <p><span class="figure">${count(answer.count)}</span> tensors, ${size(answer.bytes)}; as loaded <b>${size(answer.result_bytes)}</b>${answer.result_bytes == null ? "" : ` (${percent(answer.result_bytes / (answer.bytes || 1))})`}.</p>
    ${answer.quantization && html`<p>The checkpoint is quantized already: ${answer.quantization}.</p>`}
    ${answer.notes.map((/** @type {string} */ note) => html`<p key=${note} class="error">${note}</p>`)}
    <${Table} label="Layers" rows=${answer.layers} columns=${COLUMNS} rowKey=${(/** @type {any} */ layer) => `${layer.name} ${layer.shape} ${layer.dtype}`} search="Search layers" />
  </div>`;
}
