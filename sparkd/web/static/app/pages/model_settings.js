// The tab of a model's settings: as configured, as resolved, as each rank's engine has them; and the editor of its entry.

import { ADMIN, modelPath, post, put } from "../api.js";
import { Copy } from "../components/copy.js";
import { EntryKeys, keyOf, rowsOf, specOf } from "../components/entry_keys.js";
import { quoted } from "../components/fit.js";
import { Check } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Table } from "../components/table.js";
import { act, sentence } from "../components/toast.js";
import { html, useMemo, useState } from "../lib.js";
import { models } from "../store.js";
import { UNKNOWN } from "../units.js";
import { entryText, shown, tokens } from "../yaml.js";

/** @typedef {{key: string, configured: unknown, resolved: unknown, engines: unknown[], differs: boolean}} Setting */

/** @param {{name: string}} props */
export function ModelSettings({ name }) {
  const model = models.of(name).value;
  const { answer, problem, busy, again } = useAnswer(modelPath(name, "/settings"), `${model?.generation} ${model?.state === "READY"}`);
  const [only, setOnly] = useState(false);
  const [editing, setEditing] = useState(false);
  const rows = useMemo(() => settingsOf(answer).filter((row) => !only || row.differs), [answer, only]);
  const columns = useMemo(() => columnsFor(answer?.ranks ?? []), [answer]);
  if (!answer) return html`<${Waiting} problem=${problem} busy=${busy} empty=${true} />`;
  const reload = () => act(() => post(`${ADMIN}/reload`), "sparkd read its configuration again.").then(again);
  return html`<div class="stack">
    <${Waiting} problem=${problem} busy=${busy} empty=${false} />
    <div class="actions">
      ${model?.origin === "api" && !editing && html`<button type="button" onClick=${() => setEditing(true)}>Edit keys</button>`}
      ${model?.origin === "file" && html`<button type="button" onClick=${reload}>Reload the configuration</button><span class="hint">This entry is in the configuration file: change it there.</span>`}
      <${Copy} text=${() => entryText(name, answer.configured ?? {})} label="Copy entry" />
      <${Copy} text=${`sparkd export ${quoted(name)} DIR`} label="Copy the command sparkd export" />
    </div>
    ${editing && html`<${Editor} name=${name} keys=${answer.keys} configured=${answer.configured} onEnd=${() => (setEditing(false), again())} />`}
    <${Table} label="Settings" rows=${rows} columns=${columns} rowKey=${(/** @type {Setting} */ row) => row.key} search="Search settings" more=${html`<${Check} label="Differences only" checked=${only} onChange=${setOnly} />`} />
    ${(answer.ranks ?? []).map((/** @type {any} */ rank) => rank.command && html`<details key=${rank.rank}><summary>Command of rank ${rank.rank} on ${rank.node}</summary><pre>${rank.command.join(" ")}</pre></details>`)}
  </div>`;
}

/** @param {any} answer @returns {Setting[]} */
function settingsOf(answer) {
  if (!answer) return [];
  const { configured = {}, resolved = {}, ranks = [] } = answer;
  const keys = new Set([...Object.keys(configured), ...Object.keys(resolved), ...ranks.flatMap((/** @type {any} */ rank) => Object.keys(rank.engine ?? {}))]);
  return [...keys].sort().map((key) => {
    const engines = ranks.map((/** @type {any} */ rank) => rank.engine?.[key]);
    // A default is nobody's choice: on a CPU sparkd itself adds --enforce-eager.
    const known = [configured[key], ...engines].map(comparable).filter((value) => value !== undefined);
    return { key, configured: configured[key], resolved: resolved[key], engines, differs: known.some((value) => value !== known[0]) };
  });
}

/** Text that is equal where two values mean the same: `auto` and null leave the choice open, 32K is 32768. Lists and mappings have many spellings. @param {unknown} value */
const comparable = (value) => (value === null || value === undefined || value === "auto" || typeof value === "object" ? undefined : shown(typeof value === "string" ? tokens(value) : value));

/** @param {any[]} ranks @returns {import("../components/table.js").Column<Setting>[]} */
function columnsFor(ranks) {
  const cell = (/** @type {unknown} */ value) => (value === undefined ? UNKNOWN : html`<code>${shown(value)}</code>`);
  return [
    { head: "Key", name: true, value: (row) => row.key, cell: (row) => html`<code>${row.key}</code>${row.differs && html` <span class="word busy">differs</span>`}` },
    { head: "Configured", value: (row) => row.configured === undefined ? null : shown(row.configured), cell: (row) => cell(row.configured) },
    { head: "Resolved", value: (row) => row.resolved === undefined ? null : shown(row.resolved), cell: (row) => cell(row.resolved) },
    ...ranks.map((rank, place) => ({ head: `Rank ${rank.rank} (${rank.node})`, value: (/** @type {Setting} */ row) => row.engines[place] === undefined ? null : shown(row.engines[place]), cell: (/** @type {Setting} */ row) => cell(row.engines[place]) })),
  ];
}

/** @param {{name: string, keys: string[], configured: Record<string, unknown>, onEnd: () => void}} props */
function Editor({ name, keys, configured, onEnd }) {
  const [rows, setRows] = useState(rowsOf(configured));
  const [refusal, setRefusal] = useState(/** @type {unknown} */ (null));
  const running = models.of(name).value?.want === "RUNNING";
  const save = async (/** @type {Event} */ event) => {
    event.preventDefault();
    try {
      const taken = await put(modelPath(name), { spec: specOf(rows), load: running });
      act(async () => taken, `${name} was changed.`);
      onEnd();
    } catch (error) {
      setRefusal(error);
    }
  };
  return html`<form class="panel" onSubmit=${save}>
    ${!!refusal && !keyOf(refusal, rows) && html`<p class="error" role="alert">${sentence(refusal)}</p>`}
    <${EntryKeys} keys=${keys} rows=${rows} onChange=${setRows} refusal=${refusal} />
    <div class="actions"><button class="main">Save</button><button type="button" onClick=${onEnd}>Cancel</button>${running && html`<span class="hint">The engine starts again if a key that it depends on changes.</span>`}</div>
  </form>`;
}
