// The overview: nodes with their memory, cables, models, what waits, and what is wrong.

import { ADMIN, get } from "../api.js";
import { MemoryBar } from "../components/memory_bar.js";
import { ModelActions } from "../components/model_actions.js";
import { isStarting, LastFailure, Since, State, Tries, Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { html, signal, useComputed, useEffect, useRef, useState } from "../lib.js";
import { to } from "../router.js";
import { cables, conditions, hostOf, lastIncident, models, nodes } from "../store.js";
import { bandwidth, celsius, count, duration, gib, GIB, megahertz, moment, percent, rate, size, stage, UNKNOWN, watts } from "../units.js";
import { useVisible } from "../visibility.js";

export function Overview() {
  return html`<section class="page">
    <h1 class="offscreen">Overview</h1>
    <${Conditions} /><${Nodes} /><${Resident} /><${Waiting} /><${Troubles} />
  </section>`;
}

function Conditions() {
  const some = conditions.value;
  if (!some.length) return null;
  return html`<section aria-label="Conditions">
    <ul class="notes">
      ${some.map((one) => html`<li key=${one.reason + one.message}><b>${one.reason}</b>${one.node && ` · ${one.node}`}: ${one.message}</li>`)}
    </ul>
  </section>`;
}

function Nodes() {
  const addresses = nodes.keys.value;
  const some = cables.value;
  const pair = addresses.length === 2 && some.length > 0;
  return html`<section aria-label="Nodes">
    <div class=${pair ? "cards pair" : "cards"}>
      ${addresses.map((address, place) => html`
        ${pair && place === 1 && html`<${Cables} key="cables" />`}
        <${NodeCard} key=${address} address=${address} />
      `)}
    </div>
    ${!pair && some.length > 0 && html`<${Cables} />`}
  </section>`;
}

/** A node that is not on the screen is not drawn again. @param {{address: string}} props */
function NodeCard({ address }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const visible = useVisible(ref);
  const entry = nodes.of(address);
  const node = visible.value ? entry.value : entry.peek();
  const overMinute = useSlope(node?.reading);
  if (!node) return html`<article class="card" ref=${ref}></article>`;
  const reading = node.reading;
  return html`<article class="card" ref=${ref} aria-label="Node ${hostOf(node)}">
    <header class="card-head">
      <h2>${hostOf(node)}</h2>
      <span class="quiet-text">${node.machine ? address : ""}${node.local ? " · head" : ""}</span>
      ${node.agent ? html`<${Word} word=${reading?.level ?? "no reading"} />` : html`<${Word} word="its agent does not answer" tone="bad" />`}
    </header>
    <${MemoryBar} node=${node} />
    ${reading?.guarded === false && html`<p class="error">No memory guard watches this node.</p>`}
    ${reading?.level_why && html`<p class="error">${reading.level_why}</p>`}
    <dl class="figures">
      <${Pair} name="available" value=${gib(reading?.mem_available_bytes)} />
      <${Pair} name="slope" value=${slope(reading?.level === "ok" ? overMinute : slopeOf(node))} />
      <${Pair} name="to the floor" value=${reading?.level === "ok" || reading?.floor_in_s == null ? UNKNOWN : duration(reading.floor_in_s)} />
      <${Pair} name="PSI some / full" value=${`${psi(reading?.psi_some_avg10)} / ${psi(reading?.psi_full_avg10)}`} />
      <${Pair} name="GPU" value=${reading?.gpu_name ?? "none seen"} />
      ${reading?.gpu_name && html`
        <${Pair} name="busy" value=${percent(fractionOf(reading.gpu_busy_percent))} />
        <${Pair} name="power" value=${watts(reading.gpu_power_w)} />
        <${Pair} name="temperature" value=${celsius(reading.gpu_celsius)} />
        <${Pair} name="clock" value=${megahertz(reading.gpu_clock_mhz)} />`}
      <${Pair} name="disk free" value=${diskOf(node.machine)} />
      <${Pair} name="up" value=${duration(node.machine?.uptime_s)} />
    </dl>
    ${reading?.gpu_throttled?.length ? html`<p class="error">The GPU is throttled: ${reading.gpu_throttled.join(", ")}.</p>` : null}
    ${reading?.device_trouble && html`<p class="error">${reading.device_trouble}</p>`}
    <${Past} address=${address} />
  </article>`;
}

/** The charts, whose modules come when they are opened for the first time. @type {Signal<any>} */
const charts = signal(null);

/** @param {{address: string}} props */
function Past({ address }) {
  const [open, setOpen] = useState(false);
  const toggle = (/** @type {any} */ event) => {
    setOpen(event.currentTarget.open);
    if (!charts.peek()) import("../components/node_history.js").then((module) => (charts.value = module.NodeHistory));
  };
  return html`<details onToggle=${toggle}><summary>The last 15 minutes</summary>${open && charts.value && html`<${charts.value} address=${address} />`}</details>`;
}

/** @param {{name: string, value: any}} props */
const Pair = ({ name, value }) => html`<div><dt>${name}</dt><dd class="figure">${value}</dd></div>`;

/** @param {number | null | undefined} value */
const fractionOf = (value) => (value == null ? null : value / 100);
/** @param {number | null | undefined} value */
const psi = (value) => (value == null ? UNKNOWN : `${value.toFixed(1)}%`);
/** The change of available memory over the last minute that was seen, bytes a second: a second of page cache is no trend. @param {any} reading */
function useSlope(reading) {
  const seen = useRef(/** @type {{atS: number, bytes: number}[]} */ ([]));
  if (!reading) return null;
  const last = { atS: reading.at_s, bytes: reading.mem_available_bytes };
  seen.current = [...seen.current.filter((one) => one.atS < last.atS && one.atS >= last.atS - MINUTE_S), last];
  const first = seen.current[0] ?? last;
  return last.atS - first.atS < MINUTE_S / 4 ? null : (last.bytes - first.bytes) / (last.atS - first.atS);
}

/** The slope that the time to the floor stands for: the steeper of two spans where memory shrinks. @param {LiveNode} node */
function slopeOf({ reading, limits }) {
  const [available, floor, inS] = [reading?.mem_available_bytes, limits?.floor, reading?.floor_in_s];
  return available != null && floor != null && inS ? (floor - available) / inS : reading?.slope_bytes_per_s;
}
/** @param {number | null | undefined} bytesPerS */
const slope = (bytesPerS) => (bytesPerS == null ? UNKNOWN : `${bytesPerS < 0 ? "−" : "+"}${size(Math.abs(bytesPerS))}/s`);

/** @param {LiveNode["machine"]} machine */
const diskOf = (machine) => (machine?.disk_total_bytes && machine.disk_free_bytes != null ? `${count(Math.round(machine.disk_free_bytes / GIB))} GiB, ${percent(machine.disk_free_bytes / machine.disk_total_bytes)}` : UNKNOWN);

/** @param {string} address */
const endOf = (address) => {
  const node = nodes.of(address).value;
  return node ? hostOf(node) : address;
};

function Cables() {
  return html`<ul class="cables" aria-label="Cables">
    ${cables.value.map((cable) => {
      const problem = cable.problem ?? cable.rails.map((rail) => rail.problem).find(Boolean);
      const verdict = cable.verdict ?? (problem ? "warn" : "ok");
      return html`<li key=${[cable.a, cable.a_cage, cable.b, cable.b_cage].join(" ")} class="cable ${verdict}">
        <span class="ends">${endOf(cable.a)} cage ${cable.a_cage} – ${endOf(cable.b)} cage ${cable.b_cage}</span>
        <${Word} word=${verdict} /> <span class="figure">${count(cable.rails.length)} rails</span>
        <span class="figure">${cable.rate_gb_s == null ? "not measured" : bandwidth(cable.rate_gb_s * 1e9)}</span>
        ${problem && html`<span class="error">${problem}</span>`}
      </li>`;
    })}
  </ul>`;
}

const MINUTE_S = 60;

const seen = (/** @type {string} */ name) => models.of(name).value;
/** @param {LiveModel | null} model */
const resident = (model) => model !== null && (model.state !== "STOPPED" || model.want === "RUNNING");

/** @type {import("../components/table.js").Column<string>[]} */
const COLUMNS = [
  { head: "Model", name: true, value: (name) => name, cell: (name) => html`<a href=${to("models", name)}>${name}</a>` },
  { head: "State", value: (name) => seen(name)?.state, cell: (name) => html`<${State} model=${seen(name) ?? { state: "gone" }} />` },
  { head: "Tokens/s", end: true, hint: "generated", value: (name) => seen(name)?.rates?.generation_tokens_per_s, cell: (name) => html`<span class="figure">${rate(seen(name)?.rates?.generation_tokens_per_s)}</span>` },
  { head: "KV use", end: true, value: (name) => seen(name)?.rates?.kv_usage, cell: (name) => html`<span class="figure">${percent(seen(name)?.rates?.kv_usage)}</span>` },
  { head: "Running", end: true, value: (name) => seen(name)?.rates?.running ?? seen(name)?.in_flight, cell: (name) => html`<span class="figure">${count(seen(name)?.rates?.running ?? seen(name)?.in_flight)}</span>` },
  { head: "Waiting", end: true, value: (name) => waitingOf(seen(name)), cell: (name) => html`<span class="figure">${count(waitingOf(seen(name)))}</span>` },
  { head: "Memory", end: true, value: (name) => seen(name)?.memory_gib, cell: (name) => html`<span class="figure">${seen(name)?.memory_gib == null ? UNKNOWN : `${seen(name)?.memory_gib} GiB`}</span>` },
  { head: "Node", value: (name) => placeOf(seen(name)), cell: (name) => placeOf(seen(name)) },
  { head: "For", end: true, cell: (name) => html`<${Since} atS=${seen(name)?.since_s} />` },
  { head: "", cell: (name) => html`<${ModelActions} name=${name} />` },
];

/** In the engine, and before it in the gateway. @param {LiveModel | null} model */
const waitingOf = (model) => (model ? (model.rates?.waiting ?? 0) + (model.queued ?? 0) : null);
/** @param {LiveModel | null} model */
const placeOf = (model) => (model?.ranks ?? []).map((rank) => rank.node).join(", ") || model?.node || UNKNOWN;
/** @param {string} name */
const isResident = (name) => resident(seen(name));

/** So many models are offered to be loaded where none is. */
const OFFERED = 5;

function Resident() {
  const names = models.keys.value;
  return html`<section>
    <h2>Models</h2>
    <${Table} label="Resident models" rows=${names} columns=${COLUMNS} rowKey=${(/** @type {string} */ name) => name} matches=${isResident}
      search=${names.length > 20 ? "Search models" : undefined}
      empty=${html`No model is known. <a href=${to("models")}>Add one</a>.`}
      none=${html`No model is loaded.${names.slice(0, OFFERED).map((name) => html` <span key=${name} class="offered">${name} <${ModelActions} name=${name} /></span>`)}`} />
    <p><a href=${to("models")}>All known models (${names.length})</a></p>
  </section>`;
}

/** @param {LiveModel} model */
const isWaiting = (model) => model.turn != null || model.wait != null || model.queued > 0 || (model.want === "RUNNING" && model.state === "FAILED") || isStarting(model);

function Waiting() {
  // A text, so that the list is drawn again only where its names or their order change.
  const names = useComputed(() => JSON.stringify(models.all().filter(isWaiting).sort((a, b) => (a.turn ?? Infinity) - (b.turn ?? Infinity)).map((model) => model.name)));
  /** @type {string[]} */
  const some = JSON.parse(names.value);
  if (!some.length) return null;
  return html`<section>
    <h2>Waiting</h2>
    <ul class="notes">${some.map((name) => html`<${WaitingModel} key=${name} name=${name} />`)}</ul>
  </section>`;
}

/** @param {{name: string}} props */
function WaitingModel({ name }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const visible = useVisible(ref);
  const entry = models.of(name);
  const model = visible.value ? entry.value : entry.peek();
  if (!model) return null;
  return html`<li ref=${ref}>
    <a href=${to("models", name)}>${name}</a> <${State} model=${model} />${" "}
    ${model.message ?? `${stage(model.state, model.progress)}.`}
    <${Tries} model=${model} />${model.last_failure && html` <${LastFailure} failure=${model.last_failure} />`}
    ${model.queued > 0 && html` <span class="figure">${count(model.queued)}</span> ${model.queued === 1 ? "request waits" : "requests wait"}.`}
  </li>`;
}

/** The last examination of this visit: each one starts programs on every node. @type {Signal<{findings: Finding[], verdict: string} | null>} */
const examination = signal(null);
/** @type {Signal<any[]>} */
const incidents = signal([]);

function Troubles() {
  const last = lastIncident.value;
  useEffect(() => {
    if (!examination.peek()) get(`${ADMIN}/doctor`).then((answer) => (examination.value = answer), () => {});
  }, []);
  useEffect(() => {
    get(`${ADMIN}/incidents`).then((answer) => (incidents.value = answer.incidents.slice(0, 3)), () => {});
  }, [last]);
  const bad = (examination.value?.findings ?? []).filter((finding) => finding.verdict !== "ok");
  if (!bad.length && !incidents.value.length) return null;
  return html`<section>
    <h2>Findings and incidents</h2>
    <ul class="notes">
      ${bad.slice(0, 5).map((one) => html`<li key=${one.check + one.node + one.about}><${Word} word=${one.verdict} /> ${one.node} · ${one.about}: ${one.evidence}</li>`)}
      ${incidents.value.map((one) => html`<li key=${one.id}><${Word} word="incident" tone="bad" /> <a href=${to("doctor", one.id)}>${moment(one.at_s)}</a> ${one.node} · ${one.model ?? ""}: ${one.why}</li>`)}
    </ul>
    ${bad.length > 5 && html`<p><a href=${to("doctor")}>${bad.length} findings</a></p>`}
  </section>`;
}
