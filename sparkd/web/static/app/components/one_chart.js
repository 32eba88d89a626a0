// Owns a chart of series that the daemon keeps.

import { useHistory } from "../history.js";
import { html } from "../lib.js";
import { Chart } from "./chart.js";

/** @param {{title: string, names: string[], labels: string[], text: (value: any) => string, most?: number, span: number}} props */
export function OneChart({ title, names, labels, text, most, span }) {
  const { data, refused } = useHistory(names, span);
  const series = labels.map((label, place) => ({ label, colour: `--series-${(place % 4) + 1}`, dash: place >= 4 }));
  if (refused.value) return html`<figure class="chart"><figcaption>${title}</figcaption><p class="error">${refused.value}</p></figure>`;
  return html`<${Chart} title=${title} series=${series} data=${data} text=${text} most=${most} />`;
}
