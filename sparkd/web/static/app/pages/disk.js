// The page of what lies on the disk: hub cache, quantized cache, profiles, and pulls under way.

import { ADMIN, post, remove } from "../api.js";
import { confirmed } from "../components/dialog.js";
import { Field } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Progress, Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { act } from "../components/toast.js";
import { html, useMemo, useState } from "../lib.js";
import { to } from "../router.js";
import { now, operations } from "../store.js";
import { amounts, count, duration, gib, percent, size, UNKNOWN } from "../units.js";
import { Pull } from "./models.js";

/** @type {Record<string, string>} */
const KINDS = { hub: "hub cache", quantized: "quantized cache", profile: "profile" };

export function Disk() {
  // Asked again whenever an operation begins or ends.
  const { answer, problem, busy, again } = useAnswer(`${ADMIN}/disk`, running().map((operation) => operation.id).join());
  const [source, setSource] = useState("");
  const [pulling, setPulling] = useState("");
  const columns = useMemo(columnsFor, []);
  const [wrong, setWrong] = useState("");
  const pull = (/** @type {Event} */ event) => {
    event.preventDefault();
    const name = source.trim();
    // The path of a folder cannot stand in the address of a request, where a model's name does.
    const isFolder = /^(\/|~|\.\.?(\/|$))/.test(name);
    setWrong(isFolder ? `${name} is a folder, and a hub id (owner/name) or a model's name is expected here.` : "");
    if (!isFolder) setPulling(name);
  };
  const verify = () => act(() => post(`${ADMIN}/disk/verify`, {}));
  return html`<section class="page">
    <div class="page-head"><h1>Disk</h1><button type="button" onClick=${again} disabled=${busy}>Look again</button><button type="button" onClick=${verify}>Verify all</button></div>
    <form class="pull-form" onSubmit=${pull}>
      <${Field} label="Pull a model" value=${source} onInput=${setSource} error=${wrong} required mono placeholder="hub id" /><button>Pull</button>
    </form>
    ${pulling && html`<${Pull} name=${pulling} onClose=${() => setPulling("")} />`}
    <${Pulls} />
    <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
    ${answer && html`
      <ul class="notes">
        ${(answer.folders ?? []).map((/** @type {any} */ folder) => html`<li key=${folder.kind + folder.node + folder.path}>
          <b>${KINDS[folder.kind] ?? folder.kind}</b>${folder.node ? ` on ${folder.node}` : ""}: <span class="figure">${size(folder.size_bytes)}</span>${folder.limit_bytes ? ` of ${size(folder.limit_bytes)}` : ""} in <code>${folder.path}</code>${folder.free_bytes == null ? "" : `, ${gib(folder.free_bytes)} free on the disk`}
        </li>`)}
      </ul>
      <${Table} label="On the disk" rows=${answer.entries ?? []} columns=${columns} rowKey=${(/** @type {any} */ row) => `${row.kind} ${row.node} ${row.id}`} search="Search the disk" empty="Nothing is kept." />`}
  </section>`;
}

const running = () => operations.all().filter((operation) => operation.state === "RUNNING");

/** @returns {import("../components/table.js").Column<any>[]} */
function columnsFor() {
  const forget = async (/** @type {any} */ row) => {
    const used = row.used_by.length ? `${row.used_by.join(", ")} uses it and reads it anew at the next start.` : "No known model uses it.";
    const yes = await confirmed(`Remove ${row.name}?`, `${size(row.size_bytes)} of the ${KINDS[row.kind] ?? row.kind} are deleted. ${used}`, "Remove");
    if (yes) await act(() => remove(`${ADMIN}/disk/${encodeURIComponent(row.kind)}/${encodeURIComponent(row.id)}?${new URLSearchParams({ node: row.node })}`));
  };
  return [
    { head: "Name", name: true, value: (row) => row.name, cell: (row) => row.name },
    { head: "Kind", value: (row) => row.kind, cell: (row) => KINDS[row.kind] ?? row.kind },
    { head: "Node", value: (row) => row.node, cell: (row) => row.node ?? UNKNOWN },
    { head: "Size", end: true, value: (row) => row.size_bytes, cell: (row) => size(row.size_bytes) },
    { head: "Last use", end: true, value: (row) => row.used_s, cell: (row) => (row.used_s == null ? UNKNOWN : duration(now.peek() - row.used_s)) },
    { head: "Used by", value: (row) => row.used_by.join(" "), cell: (row) => (row.used_by.length ? row.used_by.map((/** @type {string} */ name, /** @type {number} */ place) => html`${place > 0 && ", "}<a key=${name} href=${to("models", name)}>${name}</a>`) : UNKNOWN) },
    { head: "Valid", value: (row) => (row.valid == null ? null : String(row.valid)), cell: (row) => (row.valid == null ? UNKNOWN : html`<${Word} word=${row.valid ? "yes" : "no"} tone=${row.valid ? "good" : "bad"} />${row.fault && html`<span class="wrap quiet-text" title=${row.fault}>${row.fault}</span>`}`) },
    { head: "", cell: (row) => html`<span class="row-actions">
      <button type="button" aria-label="Verify ${row.name}" onClick=${() => act(() => post(`${ADMIN}/disk/verify`, { kind: row.kind, id: row.id }))}>Verify</button>
      <button type="button" aria-label="Remove ${row.name}" onClick=${() => forget(row)}>Remove</button></span>` },
  ];
}

function Pulls() {
  const some = running().filter((operation) => !["load", "unload", "bench"].includes(operation.kind));
  if (!some.length) return null;
  return html`<section><h2>Under way</h2>
    <ul class="notes">${some.map((operation) => html`<li key=${operation.id}>
      <div class="page-head"><span><b>${operation.kind}</b> ${operation.model}${operation.message ? `: ${operation.message}` : ""}</span>
        <span class="figure">${[operation.progress?.fraction == null ? "" : percent(operation.progress.fraction), ...(operation.progress ? amounts(operation.progress) : []), operation.progress?.eta_s == null ? "" : `about ${count(Math.round(operation.progress.eta_s))} s left`].filter(Boolean).join(", ")}</span>
        <button type="button" aria-label="Cancel ${operation.kind} ${operation.model}" onClick=${() => act(() => remove(`${ADMIN}/operations/${operation.id}`))}>Cancel</button></div>
      <${Progress} fraction=${operation.progress?.fraction} label="Progress of ${operation.kind} ${operation.model}" />
    </li>`)}</ul>
  </section>`;
}
