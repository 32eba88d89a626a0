// The tab of a model's figures over time.

import { Chart } from "../components/chart.js";
import { OneChart } from "../components/one_chart.js";
import { LONG_S, SHORT_S, useHistory } from "../history.js";
import { computed, html, useComputed, useMemo, useSignal } from "../lib.js";
import { models, nodes } from "../store.js";
import { celsius, count, GIB, gib, joules, percent, rate, seconds, tokensPerS, watts } from "../units.js";

/** title, the series of the model with their labels, how a figure reads, and the upper end of the scale. @type {[string, [string, string][], (value: any) => string, number?][]} */
const CHARTS = [
  ["Tokens/s", [["generation_tokens_per_s", "generation"], ["prompt_tokens_per_s", "prompt"]], rate],
  ["Time to first token", [["ttft_p50_s", "p50"], ["ttft_p95_s", "p95"]], seconds],
  ["Time between tokens", [["itl_p50_s", "p50"]], seconds],
  ["Whole request", [["e2e_p95_s", "p95"]], seconds],
  ["Requests", [["running", "running"], ["waiting", "waiting"]], count],
  ["KV cache use", [["kv_usage", "in use"]], percent, 1],
];

/** @param {{name: string}} props */
export function ModelLive({ name }) {
  const span = useSignal(SHORT_S);
  const place = useMemo(() => computed(() => (models.of(name).value?.ranks ?? []).map((rank) => rank.node).filter((node, at, all) => all.indexOf(node) === at).join("|")), [name]).value;
  const addresses = place ? place.split("|") : [];
  return html`<div class="stack">
    <${Figures} name=${name} />
    <div class="actions" role="group" aria-label="Span">
      ${/** @type {[number, string][]} */ ([[SHORT_S, "15 min"], [LONG_S, "24 h"]]).map(([one, text]) => html`<button type="button" key=${one} aria-pressed=${span.value === one ? "true" : "false"} onClick=${() => (span.value = one)}>${text}</button>`)}
    </div>
    <div class="charts">
      ${CHARTS.map(([title, series, text, most]) => html`<${OneChart} key=${title + span.value} title=${title} names=${series.map(([figure]) => `model.${name}.${figure}`)} labels=${series.map(([, label]) => label)} text=${text} most=${most} span=${span.value} />`)}
      <${Memory} key=${`memory${span.value}`} name=${name} span=${span.value} />
      ${addresses.length > 0 && html`<${OneChart} key=${`power${span.value}${place}`} title="GPU power" names=${addresses.map((address) => `node.${address}.gpu_power_w`)} labels=${addresses.map((address) => nodes.of(address).peek()?.machine?.host ?? address)} text=${watts} span=${span.value} optional />
        <${OneChart} key=${`heat${span.value}${place}`} title="GPU temperature" names=${addresses.map((address) => `node.${address}.gpu_celsius`)} labels=${addresses.map((address) => nodes.of(address).peek()?.machine?.host ?? address)} text=${celsius} span=${span.value} optional />`}
    </div>
  </div>`;
}

/** @type {import("../components/chart.js").Series[]} */
const MEMORY = [
  { label: "reserved", colour: "--series-4", filled: true },
  { label: "in use", colour: "--series-1", filled: true },
];

/** What the engine uses, on what is reserved for it: a reservation that comes into use changes no total. @param {{name: string, span: number}} props */
function Memory({ name, span }) {
  const { data, refused } = useHistory([`model.${name}.memory_bytes`], span);
  const stacked = useComputed(() => {
    const [times = [], used = []] = data.value;
    const model = models.of(name).value;
    const reserved = (model?.memory_gib ?? 0) * GIB * new Set(model?.ranks.map((rank) => rank.node)).size;
    return [times, used.map((bytes) => (bytes === null || !reserved ? null : Math.max(bytes, reserved))), used];
  });
  if (refused.value) return html`<figure class="chart"><figcaption>Memory</figcaption><p class="error">${refused.value}</p></figure>`;
  return html`<${Chart} title="Memory" series=${MEMORY} data=${stacked} text=${gib} />`;
}

/** @param {{name: string}} props */
function Figures({ name }) {
  const model = models.of(name).value;
  const rates = model?.rates;
  if (!rates) return html`<p class="quiet-text">No figures: the engine does not run.</p>`;
  const power = powerOf(model);
  /** @type {[string, string][]} */
  const pairs = [
    ["generation", tokensPerS(rates.generation_tokens_per_s)],
    ["prompt", tokensPerS(rates.prompt_tokens_per_s)],
    ["first token p50 / p95", `${seconds(rates.ttft_p50_s)} / ${seconds(rates.ttft_p95_s)}`],
    ["between tokens p50 / p95", `${seconds(rates.itl_p50_s)} / ${seconds(rates.itl_p95_s)}`],
    ["whole request p50 / p95", `${seconds(rates.e2e_p50_s)} / ${seconds(rates.e2e_p95_s)}`],
    ["running / waiting", `${count(rates.running)} / ${count(rates.waiting)}`],
    ["KV cache use", percent(rates.kv_usage)],
    ["prefix hits", percent(rates.prefix_hit_ratio)],
    ["GPU power", watts(power)],
    ["per token", joules(model.joules_per_token)],
  ];
  return html`<dl class="figures wide-figures">${pairs.map(([label, value]) => html`<div key=${label}><dt>${label}</dt><dd class="figure">${value}</dd></div>`)}</dl>
    ${rates.acceptance?.length ? html`<p>Draft tokens accepted, by position: ${rates.acceptance.map((/** @type {number | null} */ share, /** @type {number} */ place) => html`<span class="figure" key=${place}>${place + 1}: ${percent(share)} </span>`)}</p>` : null}`;
}

/** The sum over the model's nodes; null where one is not known. @param {LiveModel} model */
function powerOf(model) {
  const addresses = [...new Set(model.ranks.map((rank) => rank.node))];
  const some = addresses.map((address) => {
    const node = nodes.of(address).value;
    return node?.reading?.gpu_power_w ?? null;
  });
  return some.length && some.every((power) => power !== null) ? some.reduce((sum, power) => (sum ?? 0) + (power ?? 0), 0) : null;
}
