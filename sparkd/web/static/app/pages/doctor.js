// The page of the doctor's findings and of the memory guards' incidents.

import { ADMIN } from "../api.js";
import { Bar } from "../components/bar.js";
import { Chart } from "../components/chart.js";
import { Findings } from "../components/findings.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { spansOf } from "../components/log_view.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { html, signal, useEffect, useMemo, useRef } from "../lib.js";
import { route, to } from "../router.js";
import { lastIncident } from "../store.js";
import { gib, moment, size, UNKNOWN } from "../units.js";

export function Doctor() {
  const [, incident] = route.value;
  if (incident) return html`<${Incident} key=${incident} id=${incident} />`;
  return html`<section class="page"><h1 class="offscreen">Doctor and incidents</h1><${Examination} /><${Incidents} /></section>`;
}

function Examination() {
  const { answer, problem, busy, again } = useAnswer(`${ADMIN}/doctor`);
  return html`<section>
    <div class="page-head"><h2>Doctor</h2>${answer && html`<${Word} word=${answer.verdict} /><span class="quiet-text">${answer.nodes.join(", ")}</span>`}<button type="button" onClick=${again} disabled=${busy}>Examine again</button></div>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`<${Findings} findings=${answer.findings} />`}
  </section>`;
}

/** @type {import("../components/table.js").Column<any>[]} */
const COLUMNS = [
  { head: "Time", name: true, value: (one) => one.at_s, cell: (one) => html`<a class="figure" href=${to("doctor", one.id)}>${one.at_s == null ? one.id : moment(one.at_s)}</a>` },
  { head: "Node", value: (one) => one.node, cell: (one) => one.node ?? UNKNOWN },
  { head: "Model", value: (one) => one.model, cell: (one) => one.model ?? UNKNOWN },
  { head: "Level", value: (one) => one.level, cell: (one) => (one.level ? html`<${Word} word=${one.level} />` : UNKNOWN) },
  { head: "Freed", end: true, value: (one) => one.freed_bytes, cell: (one) => size(one.freed_bytes) },
  { head: "Why", value: (one) => one.why, cell: (one) => html`<span class="wrap" title=${one.why}>${one.why ?? UNKNOWN}</span>` },
];

function Incidents() {
  const { answer, problem, busy } = useAnswer(`${ADMIN}/incidents`, lastIncident.value);
  return html`<section>
    <h2>Incidents</h2>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer?.silent.length > 0 && html`<p class="error">${answer.silent.join(", ")} ${answer.silent.length === 1 ? "does" : "do"} not answer.</p>`}
    ${answer && html`<${Table} label="Incidents" rows=${answer.incidents} columns=${COLUMNS} rowKey=${(/** @type {any} */ one) => one.id} empty="The memory guard had nothing to do." />`}
  </section>`;
}

/** The columns of an incident's readings that are drawn (workers/guard/memory_sampler.py). @type {[string, string][]} */
const CURVES = [["available", "available"], ["free", "free"], ["cached", "page cache"], ["unaccounted", "unaccounted"]];

/** @param {{id: string}} props */
function Incident({ id }) {
  const { answer, problem, busy } = useAnswer(`${ADMIN}/incidents/${encodeURIComponent(id)}`);
  const curves = useMemo(() => curvesOf(answer), [answer]);
  if (!answer) return html`<section class="page"><h1>Incident</h1><${Waiting} problem=${problem} busy=${busy} empty=${true} /></section>`;
  const limits = answer.limits ?? {};
  const marks = ["soft", "hard", "floor"].flatMap((label) => (limits[`${label}_bytes`] == null ? [] : [{ label, value: limits[`${label}_bytes`] }]));
  /** @type {any[]} */
  const engines = answer.engines ?? [];
  const held = engines.flatMap((engine, place) => [
    { kind: `engine-${place % 6}`, label: `${engine.model} device`, bytes: engine.device_bytes ?? 0 },
    { kind: `engine-${place % 6} host`, label: `${engine.model} host`, bytes: engine.host_bytes ?? 0 },
  ]);
  return html`<section class="page">
    <p><a href=${to("doctor")}>Doctor and incidents</a></p>
    <div class="page-head"><h1>Incident of ${moment(answer.at_s)}</h1>${answer.level && html`<${Word} word=${answer.level} />`}</div>
    <p>The guard on ${answer.node} killed <b>${answer.model ?? "an engine"}</b>${answer.phase ? ` (${answer.phase})` : ""}: ${answer.why}. <span class="figure">${size(answer.freed_bytes)}</span> came back.</p>
    <p class="quiet-text">Asked for by ${answer.told?.by ?? "an unknown client"}; predicted ${answer.told?.predicted_gib ? `${answer.told.predicted_gib} GiB` : UNKNOWN}.</p>
    ${curves && html`<${Chart} title="Memory before the kill" series=${curves.series} data=${curves.data} text=${gib} marks=${marks} height=${260} />`}
    ${engines.length > 0 && html`<section><h2>Held by</h2>
      <${Bar} label="Memory of engines" total=${Math.max(1, held.reduce((sum, part) => sum + part.bytes, 0))} segments=${held} />
      <${Table} label="Holders of memory" rows=${engines} columns=${HOLDERS} rowKey=${(/** @type {any} */ one) => one.rank_id ?? one.model} /></section>`}
    ${answer.survivors?.length > 0 && html`<p class="error">These processes did not end: ${answer.survivors.join(", ")}.</p>`}
    ${answer.told && html`<details><summary>What sparkd knew of the engine</summary><pre>${JSON.stringify(answer.told, null, 2)}</pre></details>`}
    ${answer.log?.length > 0 && html`<section><h2>End of the engine's log</h2><${LogLines} lines=${answer.log} /></section>`}
  </section>`;
}

/** @type {import("../components/table.js").Column<any>[]} */
const HOLDERS = [
  { head: "Model", name: true, cell: (one) => one.model },
  { head: "Host", end: true, value: (one) => one.host_bytes, cell: (one) => size(one.host_bytes) },
  { head: "Device", end: true, value: (one) => one.device_bytes, cell: (one) => size(one.device_bytes) },
  { head: "Phase", cell: (one) => one.phase ?? UNKNOWN },
  { head: "Rank", cell: (one) => one.rank_id ?? UNKNOWN },
];

/** @param {any} answer */
function curvesOf(answer) {
  const names = answer?.columns ?? [];
  const rows = answer?.readings ?? [];
  const time = names.findIndex((/** @type {string} */ name) => name === "at_s" || name === "t" || name === "time_s");
  const found = CURVES.map(([name, label]) => ({ label, place: names.indexOf(name) })).filter((curve) => curve.place >= 0);
  if (!rows.length || !found.length || time < 0) return null;
  // The guard's clock counts from a start of its own; its last reading is the one at which it killed.
  const aheadS = (answer.at_s ?? 0) - rows[rows.length - 1][time];
  const times = rows.map((/** @type {any} */ row) => row[time] + aheadS);
  return {
    series: found.map((curve, place) => ({ label: curve.label, colour: `--series-${(place % 4) + 1}` })),
    data: signal([times, ...found.map((curve) => rows.map((/** @type {any} */ row) => row[curve.place] ?? null))]),
  };
}

/** @param {{lines: string[]}} props */
function LogLines({ lines }) {
  const ref = useRef(/** @type {HTMLDivElement | null} */ (null));
  useEffect(() => {
    ref.current?.replaceChildren(
      ...lines.map((line) => {
        const row = document.createElement("div");
        row.append(...spansOf(line));
        return row;
      }),
    );
  }, [lines]);
  return html`<div class="log short" role="region" aria-label="End of the engine's log" tabindex="0" ref=${ref}></div>`;
}

