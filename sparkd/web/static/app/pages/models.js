// The table of all known models.

import { get, modelPath, paramOf, post, put, remove } from "../api.js";
import { AddModel } from "../components/add_model.js";
import { confirmed, Dialog } from "../components/dialog.js";
import { Check, Field } from "../components/form.js";
import { ModelActions } from "../components/model_actions.js";
import { isStarting, Since, Start, State } from "../components/state.js";
import { Table } from "../components/table.js";
import { act, sentence } from "../components/toast.js";
import { html, useComputed, useMemo, useSignal, useState } from "../lib.js";
import { go, route, to } from "../router.js";
import { models, nodes } from "../store.js";
import { count, decimal, rate, seconds, size, UNKNOWN } from "../units.js";

const seen = (/** @type {string} */ name) => models.of(name).value;
/** @param {LiveModel | null} model */
const isResident = (model) => model !== null && (model.state !== "STOPPED" || model.want === "RUNNING");
/** @param {LiveModel | null} model */
const isWaiting = (model) => model !== null && (model.turn != null || (model.state !== "FAILED" && (model.wait != null || model.queued > 0)));

/** @type {[string, string, (model: LiveModel | null) => boolean][]} */
const FILTERS = [
  ["all", "All", () => true],
  ["resident", "Resident", isResident],
  ["waiting", "Waiting", isWaiting],
  ["failed", "Failed", (model) => model?.state === "FAILED"],
  ["stopped", "Stopped", (model) => !isResident(model)],
  ["pinned", "Pinned", (model) => model?.pin === true],
];

/** @typedef {import("../components/table.js").Column<string>} ModelColumn */
/** @param {string} head @param {(model: LiveModel) => number | null | undefined} value @param {(value: any) => string} text @returns {ModelColumn} */
const figure = (head, value, text) => ({
  head,
  end: true,
  value: (name) => {
    const model = seen(name);
    return model && value(model);
  },
  cell: (name) => {
    const model = seen(name);
    return html`<span class="figure">${text(model && value(model))}</span>`;
  },
});
/** @param {string} head @param {(model: LiveModel) => string | null | undefined} value @returns {ModelColumn} */
const text = (head, value) => {
  const of = (/** @type {string} */ name) => {
    const model = seen(name);
    return (model && value(model)) || UNKNOWN;
  };
  return { head, value: of, cell: of };
};

/** @type {ModelColumn[]} */
const PLAIN = [
  { head: "Model", name: true, value: (name) => [name, ...(seen(name)?.aliases ?? [])].join(" "), cell: nameCell },
  { head: "State", value: (name) => seen(name)?.state, cell: stateCell },
  { head: "For", end: true, cell: (name) => html`<${Since} atS=${seen(name)?.since_s} />` },
  figure("Context", (model) => model.max_model_len, count),
  figure("Memory", (model) => model.memory_gib, (gib) => (gib == null ? UNKNOWN : `${gib} GiB`)),
  figure("KV tokens", (model) => model.progress?.kv_tokens, count),
  figure("Tokens/s", (model) => model.rates?.generation_tokens_per_s, rate),
  { ...figure("Requests", (model) => model.in_flight + model.queued, count), cell: (name) => html`<span class="figure">${requestsOf(seen(name))}</span>` },
  text("Node", (model) => model.ranks.map((rank) => rank.node).join(", ") || model.node),
];
/** @type {ModelColumn[]} */
const WIDE = [
  text("Source", (model) => model.source),
  text("Want", (model) => model.want),
  figure("Load", (model) => model.load_s, seconds),
  text("Loaded from", (model) => model.progress?.source),
  figure("KV cache", (model) => model.progress?.kv?.pool_bytes, size),
  figure("Full requests", (model) => model.progress?.kv?.sequences, decimal),
  figure("A token", (model) => model.progress?.kv?.bytes_per_token, size),
  figure("Margin", (model) => model.progress?.kv?.margin_bytes, size),
  figure("Free", (model) => model.progress?.kv?.slack_bytes, size),
  text("Sized by", (model) => (model.progress?.kv?.phase === "stock" ? "vLLM" : model.progress?.kv?.source)),
  text("Tools", (model) => model.parsers?.tool),
  text("Reasoning", (model) => model.parsers?.reasoning),
  figure("PID", (model) => model.ranks[0]?.pid, (pid) => (pid == null ? UNKNOWN : String(pid))),
];
/** @type {ModelColumn} */
const ACTIONS = { head: "", cell: (name) => html`<${ModelActions} name=${name} /><${MoreActions} name=${name} />` };

/** @param {LiveModel | null} model */
const requestsOf = (model) => (model ? `${model.in_flight}${model.queued ? ` +${model.queued}` : ""}` : UNKNOWN);

/** @param {string} name */
function nameCell(name) {
  const model = seen(name);
  return html`<a href=${to("models", name)}>${name}</a>${model?.pin ? html` <span class="word idle">pinned</span>` : ""}${model?.default ? html` <span class="word idle">default</span>` : ""}
    ${model?.aliases.length ? html`<span class="quiet-text"> ${model.aliases.join(", ")}</span>` : ""}`;
}

/** @param {string} name */
function stateCell(name) {
  const model = seen(name);
  if (!model) return null;
  return html`<${State} model=${model} />${isStarting(model) && html`<div class="state-more"><${Start} name=${name} model=${model} /></div>`}
    ${model.message && html`<span class="wrap quiet-text" title=${model.message}>${model.message}</span>`}`;
}

export function Models() {
  const wide = useSignal(false);
  const filter = useSignal("all");
  const adding = useSignal(false);
  const columns = useMemo(() => [...PLAIN.slice(0, 2), ACTIONS, ...PLAIN.slice(2), ...(wide.value ? WIDE : [])], [wide.value]);
  const matches = useMemo(() => {
    const rule = FILTERS.find(([name]) => name === filter.value)?.[2] ?? (() => true);
    return (/** @type {string} */ name) => rule(seen(name));
  }, [filter.value]);
  return html`<section class="page">
    <div class="page-head"><h1>Models</h1><button type="button" class="main" onClick=${() => (adding.value = true)}>Add model</button></div>
    <${Table} label="Known models" rows=${models.keys.value} columns=${columns} rowKey=${(/** @type {string} */ name) => name} matches=${matches} search="Search models"
      empty="No model is known. Add one here, or configure one in sparkd.yaml."
      more=${html`<select aria-label="Show" value=${filter.value} onChange=${(/** @type {any} */ event) => (filter.value = event.currentTarget.value)} class="slim">
          ${FILTERS.map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}
        </select>
        <${Check} label="All columns" checked=${wide.value} onChange=${(/** @type {boolean} */ checked) => (wide.value = checked)} />`} />
    ${adding.value && html`<${AddModel} onClose=${() => (adding.value = false)} />`}
  </section>`;
}

/** Pull, pin and remove. @param {{name: string}} props */
export function MoreActions({ name }) {
  const [pulling, setPulling] = useState(false);
  const facts = useComputed(() => {
    const model = seen(name);
    return model ? JSON.stringify({ pin: model.pin, want: model.want, origin: model.origin }) : "";
  }).value;
  if (!facts) return null;
  const model = JSON.parse(facts);
  const pin = async () => {
    const { configured } = await get(modelPath(name, "/settings"));
    return put(modelPath(name), { spec: { ...configured, pin: !model.pin }, load: model.want === "RUNNING" });
  };
  const forget = async () => {
    const yes = await confirmed(`Remove ${name}?`, "sparkd unloads it and forgets its entry. Its files stay on the disk.", "Remove");
    if (yes && (await act(() => remove(modelPath(name)).then(() => true), `${name} was removed.`)) && route.peek()[1] === name) go("models");
  };
  return html`<span class="row-actions more">
    <button type="button" aria-label="Pull ${name}" onClick=${() => setPulling(true)}>Pull</button>
    ${model.origin === "api" && html`<button type="button" aria-label="${model.pin ? "Unpin" : "Pin"} ${name}" onClick=${() => act(pin, model.pin ? `${name} is not pinned any more.` : `${name} is pinned: it is never evicted for another model.`)}>${model.pin ? "Unpin" : "Pin"}</button>`}
    ${model.origin === "api" && html`<button type="button" aria-label="Remove ${name}" onClick=${forget}>Remove</button>`}
    ${pulling && html`<${Pull} name=${name} onClose=${() => setPulling(false)} />`}
  </span>`;
}

/** @param {{name: string, onClose: () => void}} props name: a known model, or a hub id */
export function Pull({ name, onClose }) {
  const [revision, setRevision] = useState("");
  const [chosen, setChosen] = useState(/** @type {string[]} */ ([]));
  const [refusal, setRefusal] = useState(/** @type {unknown} */ (null));
  const atRevision = paramOf(refusal) === "revision";
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setRefusal(null);
    try {
      const operation = await post(modelPath(name, "/pull"), { nodes: chosen.length ? chosen : "all", revision: revision || null });
      act(async () => operation);
      onClose();
    } catch (error) {
      setRefusal(error);
    }
  };
  return html`<${Dialog} title="Pull ${name}" onClose=${onClose}>
    <form onSubmit=${submit}>
      ${!!refusal && !atRevision && html`<p class="error" role="alert">${sentence(refusal)}</p>`}
      <${Field} label="Revision" value=${revision} onInput=${setRevision} error=${atRevision ? sentence(refusal) : null} hint="A branch, a tag or a commit of the hub; empty for the model's own." />
      <fieldset><legend>Nodes</legend>
        ${nodes.keys.value.map((address) => html`<${Check} key=${address} label=${nodes.of(address).value?.machine?.host ?? address} checked=${chosen.includes(address)}
          onChange=${(/** @type {boolean} */ checked) => setChosen(checked ? [...chosen, address] : chosen.filter((one) => one !== address))} />`)}
        <p class="hint">None chosen: all nodes.</p>
      </fieldset>
      <div class="actions"><button class="main">Pull</button></div>
    </form>
  <//>`;
}
