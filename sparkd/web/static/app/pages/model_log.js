// The tab of an engine's log, for each rank.

import { get, modelPath } from "../api.js";
import { LogView } from "../components/log_view.js";
import { html, useState } from "../lib.js";
import { models } from "../store.js";

/** @param {{name: string}} props */
export function ModelLog({ name }) {
  const [rank, setRank] = useState(0);
  const ranks = models.of(name).value?.ranks ?? [];
  const read = (/** @type {string | null} */ cursor) => {
    const query = new URLSearchParams({ rank: String(rank), ...(cursor === null ? {} : { cursor }) });
    return get(modelPath(name, `/log?${query}`));
  };
  return html`<div class="stack">
    ${ranks.length > 1 && html`<div class="actions" role="group" aria-label="Rank">
      ${ranks.map((one) => html`<button type="button" key=${one.rank} aria-pressed=${rank === one.rank ? "true" : "false"} onClick=${() => setRank(one.rank)}>Rank ${one.rank} on ${one.node}</button>`)}
    </div>`}
    <${LogView} label="Log of ${name}, rank ${rank}" read=${read} restart="${name} ${rank}" />
  </div>`;
}
