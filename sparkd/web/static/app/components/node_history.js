// The charts of a node: its memory and its GPU over the last minutes.

import { SHORT_S } from "../history.js";
import { html } from "../lib.js";
import { celsius, gib, percent, watts } from "../units.js";
import { OneChart } from "./one_chart.js";

/** @param {{address: string}} props */
export function NodeHistory({ address }) {
  const names = (/** @type {string[]} */ figures) => figures.map((figure) => `node.${address}.${figure}`);
  return html`<div class="stack">
    <${OneChart} title="Memory" names=${names(["available_bytes", "free_bytes", "cached_bytes", "unaccounted_bytes"])} labels=${["available", "free", "page cache", "unaccounted"]} text=${gib} span=${SHORT_S} />
    <${OneChart} title="GPU use" names=${names(["gpu_busy"])} labels=${["busy"]} text=${(/** @type {number | null} */ value) => percent(value == null ? null : value / 100)} most=${100} span=${SHORT_S} optional />
    <${OneChart} title="GPU power" names=${names(["gpu_power_w"])} labels=${["power"]} text=${watts} span=${SHORT_S} optional />
    <${OneChart} title="GPU temperature" names=${names(["gpu_celsius"])} labels=${["temperature"]} text=${celsius} span=${SHORT_S} optional />
  </div>`;
}
