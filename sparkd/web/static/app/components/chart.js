// Charts over time, or over another figure: uPlot on a canvas, with the figures as text below.

import { html, signal, useEffect, useMemo, useRef } from "../lib.js";
import { clock, count, gib, GIB } from "../units.js";
import uPlot from "../../vendor/uplot.js";

const HEIGHT = 150;
/** Where the ticks of an axis may stand, by how its figures read. @type {Map<Function, number[]>} */
const STEPS = new Map([
  [gib, [0.1, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256].map((gibs) => gibs * GIB)],
  [count, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]],
]);
const dark = matchMedia("(prefers-color-scheme: dark)");
const scheme = signal(dark.matches);
dark.addEventListener("change", () => {
  scheme.value = dark.matches;
});

/** @param {string} name */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * colour: a custom property of style.css, such as `--series-1`. filled: down to 0, so that a later series lies on an earlier one.
 * @typedef {{label: string, colour: string, dash?: boolean, filled?: boolean}} Series
 */

/**
 * data: seconds since 1970, or the figures that `across` tells of, in order; then a column for each series, null where nothing is known.
 * @param {{title: string, series: Series[], data: Signal<(number | null)[][]>, text: (value: number | null | undefined) => string, most?: number, marks?: {label: string, value: number}[], height?: number,
 *   across?: {tick: (value: number) => string, text: (value: number | null | undefined) => string}}} props
 * most: the upper end of the scale; else the greatest value. marks: lines across. across: how a figure that is no time reads below the axis and
 * in the legend; each of its points is drawn, and a line is broken where one is not known.
 */
export function Chart({ title, series, data, text, most, marks = [], height = HEIGHT, across }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  // The place under the pointer; null shows the latest figures.
  const place = useMemo(() => signal(/** @type {number | null} */ (null)), []);
  const darkNow = scheme.value;
  const names = series.map((one) => one.label).join("|");
  useEffect(() => {
    const target = box.current;
    if (!target) return;
    const axis = { stroke: colour("--text-2"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
    const plot = new uPlot(
      {
        width: Math.max(200, target.clientWidth),
        height,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { ...(across ? { x: { time: false } } : {}), y: { range: (_plot, low, high) => scaleOf(low, high, most, marks) } },
        axes: [
          { ...axis, values: (_plot, ticks) => (across ? ticks.map(across.tick) : timesOf(ticks)), space: 70 },
          { ...axis, size: 78, ...(STEPS.has(text) ? { incrs: STEPS.get(text) } : {}), values: (_plot, ticks) => ticks.map((value) => text(value)) },
        ],
        series: [{}, ...series.map((one) => ({ label: one.label, stroke: colour(one.colour), ...(one.filled ? { fill: `${colour(one.colour)}66` } : {}), width: 1.5, dash: one.dash ? [4, 3] : [], points: { show: !!across, size: 6 }, spanGaps: false }))],
        hooks: {
          setCursor: [(one) => (place.value = one.cursor.left != null && one.cursor.left >= 0 ? one.cursor.idx ?? null : null)],
          draw: [(one) => drawMarks(one, marks)],
        },
      },
      /** @type {any} */ (data.peek()),
      target,
    );
    const stop = data.subscribe((columns) => plot.setData(/** @type {any} */ (columns)));
    const resized = new ResizeObserver(() => target.clientWidth && plot.setSize({ width: target.clientWidth, height }));
    resized.observe(target);
    return () => {
      stop();
      resized.disconnect();
      plot.destroy();
    };
  }, [darkNow, names, data]);
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div class="plot" ref=${box} aria-hidden="true"></div>
    <${Figures} series=${series} data=${data} text=${text} place=${place} placeText=${across?.text ?? clock} />
  </figure>`;
}

/** @param {{series: Series[], data: Signal<(number | null)[][]>, text: (value: number | null | undefined) => string, place: Signal<number | null>, placeText: (value: number | null | undefined) => string}} props */
function Figures({ series, data, text, place, placeText }) {
  const columns = data.value;
  const times = columns[0] ?? [];
  const at = place.value ?? times.length - 1;
  return html`<ul class="legend">
    ${series.map(
      (one, number) => html`<li key=${one.label}>
        <svg class="swatch" viewBox="0 0 10 10" aria-hidden="true"><path class="key-${one.colour.slice(2)}" d=${one.dash ? "M0 3h3.5v4h-3.5zM6.5 3h3.5v4h-3.5z" : "M0 3h10v4h-10z"} /></svg>
        <span class="legend-label">${one.label}</span> <span class="figure fixed">${text(columns[number + 1]?.[at])}</span>
      </li>`,
    )}
    <li class="figure at">${placeText(times[at])}</li>
  </ul>`;
}

/** @param {number | null} low @param {number | null} high @param {number | undefined} most @param {{value: number}[]} marks @returns {[number, number]} */
function scaleOf(low, high, most, marks) {
  const top = most ?? Math.max(high ?? 0, ...marks.map((mark) => mark.value)) * 1.1;
  return [Math.min(0, low ?? 0), top > 0 ? top : 1];
}

/** The ticks of a time axis, with seconds where they would read alike in minutes. @param {number[]} ticks */
function timesOf(ticks) {
  const [first, second] = ticks;
  const withSeconds = first !== undefined && second !== undefined && second - first < 60;
  return ticks.map((atS) => clock(atS).slice(0, withSeconds ? 8 : 5));
}

/** @param {any} plot @param {{label: string, value: number}[]} marks */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("--bad");
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  // As the axes leave them, the labels would end at the left edge.
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const [place, mark] of marks.entries()) {
    const y = plot.valToPos(mark.value, "y", true);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.fillText(mark.label, bbox.left + (4 + place * 40) * devicePixelRatio, y - 3);
  }
  ctx.restore();
}
