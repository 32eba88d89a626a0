// The page of one model: its head, and the tabs below.

import { ModelActions } from "../components/model_actions.js";
import { isStarting, LastFailure, Since, Start, State, Tries } from "../components/state.js";
import { html, useComputed } from "../lib.js";
import { route, to } from "../router.js";
import { models } from "../store.js";
import { count, percent, UNKNOWN } from "../units.js";
import { ModelLayers } from "./model_layers.js";
import { ModelLive } from "./model_live.js";
import { ModelLoad } from "./model_load.js";
import { ModelLog } from "./model_log.js";
import { ModelSettings } from "./model_settings.js";
import { MoreActions } from "./models.js";

/** @type {[string, string, any][]} */
const TABS = [
  ["live", "Live", ModelLive],
  ["load", "Load", ModelLoad],
  ["settings", "Settings", ModelSettings],
  ["layers", "Layers", ModelLayers],
  ["log", "Log", ModelLog],
];

/** @type {Record<string, string>} */
const ORIGINS = { api: "the admin API", file: "the configuration file", serve: "sparkd serve" };

/** @param {{name: string}} props */
export function Model({ name }) {
  const known = useComputed(() => models.of(name).value !== null).value;
  if (!known) return html`<section class="page"><h1>${name}</h1><p class="error" role="alert">sparkd knows no model of this name. <a href=${to("models")}>All models</a></p></section>`;
  const here = route.value[2] ?? "live";
  const tab = TABS.find(([one]) => one === here) ?? TABS[0];
  return html`<section class="page">
    <${Head} name=${name} />
    <nav class="tabs" aria-label="Parts of ${name}">
      ${TABS.map(([one, text]) => html`<a key=${one} href=${to("models", name, one)} aria-current=${one === here ? "page" : null}>${text}</a>`)}
    </nav>
    ${tab && html`<${tab[2]} key=${tab[0]} name=${name} />`}
  </section>`;
}

/** @param {{name: string}} props */
function Head({ name }) {
  const model = models.of(name).value;
  if (!model) return null;
  return html`<div class="page-head"><h1>${name}</h1><${State} model=${model} /><${ModelActions} name=${name} /><${MoreActions} name=${name} /></div>
    ${model.message && html`<p class=${model.state === "FAILED" ? "error" : ""}>${model.reason && html`<b>${model.reason}</b>: `}${model.message}<${Tries} model=${model} /></p>`}
    ${model.last_failure && html`<p class="error"><${LastFailure} failure=${model.last_failure} /></p>`}
    ${model.doubt && html`<p class="error">${model.doubt}</p>`}
    ${isStarting(model) && html`<div class="stack"><${Start} name=${name} model=${model} /></div>`}
    <dl class="figures wide-figures">
      <div><dt>source</dt><dd>${model.source}</dd></div>
      <div><dt>in this state for</dt><dd><${Since} atS=${model.since_s} /></dd></div>
      <div><dt>context</dt><dd class="figure">${count(model.max_model_len)}</dd></div>
      <div><dt>memory</dt><dd class="figure">${model.memory_gib == null ? UNKNOWN : `${model.memory_gib} GiB`}</dd></div>
      <div><dt>KV cache tokens</dt><dd class="figure">${count(model.progress?.kv_tokens)}</dd></div>
      <div><dt>KV use</dt><dd class="figure">${percent(model.rates?.kv_usage)}</dd></div>
      <div><dt>requests</dt><dd class="figure">${model.in_flight}${model.queued ? ` +${model.queued}` : ""}</dd></div>
      <div><dt>nodes</dt><dd>${model.ranks.map((rank) => rank.node).join(", ") || model.node || UNKNOWN}</dd></div>
      <div><dt>wanted by</dt><dd>${model.want === "RUNNING" ? model.wanted_by : UNKNOWN}</dd></div>
      <div><dt>entry from</dt><dd>${ORIGINS[model.origin] ?? model.origin}</dd></div>
    </dl>`;
}
