// The page of the fabric: cages, cables, rates, and findings with what helps.

import { ADMIN, post } from "../api.js";
import { Copy } from "../components/copy.js";
import { Findings } from "../components/findings.js";
import { Check } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { act } from "../components/toast.js";
import { html, useState } from "../lib.js";
import { cables as liveCables, nodes, operations } from "../store.js";
import { count, decimal, moment, size, UNKNOWN } from "../units.js";

/** @param {any} one */
const speed = (one) => (one.speed_mbps == null ? UNKNOWN : one.speed_mbps >= 1000 ? `${count(one.speed_mbps / 1000)} Gb/s` : `${count(one.speed_mbps)} Mb/s`);

/** @type {import("../components/table.js").Column<any>[]} */
const INTERFACES = [
  { head: "Interface", name: true, value: (one) => one.name, cell: (one) => html`<code>${one.name}</code>` },
  { head: "Cage", cell: (one) => one.cage },
  { head: "State", cell: (one) => html`<${Word} word=${one.up && one.carrier !== false ? "up" : one.up ? "no carrier" : "down"} tone=${one.up && one.carrier !== false ? "good" : "idle"} />` },
  { head: "Speed", end: true, cell: speed },
  { head: "MTU", end: true, cell: (one) => count(one.mtu) },
  { head: "Addresses", cell: (one) => one.addresses.join(", ") || UNKNOWN },
  { head: "RDMA", cell: (one) => (one.rdma ? `${one.rdma} ${one.rdma_state ?? ""}` : UNKNOWN) },
  { head: "GID", end: true, cell: (one) => count(one.gid_index) },
  { head: "Sent", end: true, cell: (one) => size(one.sent_bytes) },
  { head: "Received", end: true, cell: (one) => size(one.received_bytes) },
  { head: "MAC", cell: (one) => one.mac ?? UNKNOWN },
];
/** @type {import("../components/table.js").Column<any>[]} */
const RATES = [
  { head: "Between", name: true, cell: (one) => `${one.a} – ${one.b}` },
  { head: "Rate", end: true, cell: (one) => `${decimal(one.gb_s)} GB/s` },
  { head: "Normal", end: true, cell: (one) => (one.normal_gb_s ? `${one.normal_gb_s} GB/s` : UNKNOWN) },
  { head: "Verdict", cell: (one) => html`<${Word} word=${one.verdict} />` },
  { head: "Rails", end: true, cell: (one) => count(one.rails) },
  { head: "Over", cell: (one) => one.network ?? one.backend },
  { head: "Measured", cell: (one) => moment(one.at_s) },
  { head: "Says", cell: (one) => html`<span class="wrap">${one.told}</span>` },
];

export function Fabric() {
  const measures = operations.all().filter((operation) => operation.kind.includes("measure"));
  const { answer, problem, busy, again } = useAnswer(`${ADMIN}/fabric`, `${liveCables.value.length} ${measures.map((one) => one.state).join()}`);
  const [force, setForce] = useState(false);
  const running = measures.find((one) => one.state === "RUNNING");
  const measure = () => act(() => post(`${ADMIN}/fabric/measure`, { nodes: "all", force }));
  return html`<section class="page">
    <div class="page-head"><h1>Fabric</h1>
      ${answer && html`<${Word} word=${answer.verdict} /> <span class="quiet-text">${answer.topology}</span>`}
      <button type="button" onClick=${again} disabled=${busy}>Look again</button>
    </div>
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`
      <section><h2>Findings</h2><${Findings} findings=${answer.findings} /></section>
      <section><h2>Cables</h2>
        ${answer.cables.length === 0 && html`<p class="quiet-text">No cable is seen.</p>`}
        <ul class="notes">${answer.cables.map((/** @type {any} */ cable) => html`<li key=${[cable.a, cable.a_cage, cable.b, cable.b_cage].join()}>
          <b>${cable.a}</b> cage ${cable.a_cage} – <b>${cable.b}</b> cage ${cable.b_cage}${cable.seen ? "" : " (not proved)"}
          <ul>${cable.rails.map((/** @type {any} */ rail) => html`<li key=${rail.a}><code>${rail.a}</code> – <code>${rail.b}</code>, ${rail.network}${rail.rdma ? ", RDMA" : ""}${rail.problem ? html`: <span class="error">${rail.problem}</span>` : ""}</li>`)}</ul>
        </li>`)}</ul>
      </section>
      <section><h2>Rates</h2>
        ${nodes.keys.value.length < 2 ? html`<p class="quiet-text">A rate is measured between two nodes; this cluster has one.</p>` : html`
          <div class="actions"><button type="button" class="main" disabled=${!!running} onClick=${measure}>Measure</button>
            <${Check} label="Even if a model uses the nodes" checked=${force} onChange=${setForce} /><span role="status">${running ? running.message || "Measuring…" : ""}</span></div>
          <${Table} label="Rates" rows=${answer.rates} columns=${RATES} rowKey=${(/** @type {any} */ one) => `${one.a} ${one.b} ${one.network}`} empty="Nothing was measured yet." />
          <p>${answer.tensor_parallel.all ? "All nodes may share a model." : `Not all nodes may share a model: ${answer.tensor_parallel.reason}`}</p>`}
      </section>
      ${answer.offered.length > 0 && html`<section><h2>Could join</h2><ul class="notes">${answer.offered.map((/** @type {any} */ one) => html`<li key=${one.node + one.cage}>${one.told}</li>`)}</ul></section>`}
      ${answer.nodes.map((/** @type {any} */ node) => html`<section key=${node.node}><h2>${node.node}${node.host !== node.node && html` <span class="quiet-text">${node.host}</span>`}</h2>
        <${Table} label="Interfaces of ${node.node}" rows=${interfacesOf(node)} columns=${INTERFACES} rowKey=${(/** @type {any} */ one) => one.name} empty="No interface is known." />
        ${(answer.environment[node.node] ?? []).length > 0 && html`<details><summary>Variables for its engines</summary>
          <pre>${environmentText(answer.environment[node.node])}</pre><${Copy} text=${environmentText(answer.environment[node.node])} /></details>`}
      </section>`)}`}
  </section>`;
}

/** @param {any} node */
const interfacesOf = (node) => [
  ...node.cages.flatMap((/** @type {any} */ cage) => cage.twins.map((/** @type {any} */ twin) => ({ ...twin, cage: cage.label }))),
  ...node.lan.map((/** @type {any} */ one) => ({ ...one, cage: "LAN" })),
  ...node.wifi.map((/** @type {any} */ one) => ({ ...one, cage: "Wi-Fi" })),
];

/** @param {any[]} settings */
const environmentText = (settings) => settings.map((one) => `${one.name}=${one.value ?? ""}`).join("\n");
