// A chart of series that the daemon keeps.

import { useHistory } from "../history.js";
import { html, useComputed } from "../lib.js";
import { Chart } from "./chart.js";

/** optional: nothing is drawn where no figure is known. @param {{title: string, names: string[], labels: string[], text: (value: any) => string, most?: number, span: number, optional?: boolean}} props */
export function OneChart({ title, names, labels, text, most, span, optional = false }) {
  const { data, refused } = useHistory(names, span);
  const empty = useComputed(() => data.value.slice(1).every((column) => column.every((value) => value === null)));
  const series = labels.map((label, place) => ({ label, colour: `--series-${(place % 4) + 1}`, dash: place >= 4 }));
  if (refused.value && !optional) return html`<figure class="chart"><figcaption>${title}</figcaption><p class="error">${refused.value}</p></figure>`;
  if (optional && empty.value) return null;
  return html`<${Chart} title=${title} series=${series} data=${data} text=${text} most=${most} />`;
}
