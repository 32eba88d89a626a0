// The series of a chart: the daemon's history, and what the live document adds to it.

import { ADMIN, get } from "./api.js";
import { effect, signal, untracked, useEffect, useMemo } from "./lib.js";
import { freshness } from "./live.js";
import { models, nodes, now } from "./store.js";

/** The spans that the daemon keeps: 15 minutes at 1 s, and 24 h at 30 s. */
export const SHORT_S = 900;
export const LONG_S = 86400;
const LONG_EVERY_S = 30;

/** @type {Record<string, string>} */
const OF_READING = {
  available_bytes: "mem_available_bytes",
  free_bytes: "mem_free_bytes",
  psi_full: "psi_full_avg10",
  gpu_busy: "gpu_busy_percent",
};

/**
 * Columns for a chart: times, then each series by its name. refused: why there are none; figures that are there stay while sparkd does not answer.
 * @param {string[]} names @param {number} spanS
 * @returns {{data: Signal<(number | null)[][]>, refused: Signal<string>}}
 */
export function useHistory(names, spanS) {
  const made = useMemo(() => ({ data: signal(/** @type {(number | null)[][]} */ ([[], ...names.map(() => [])])), refused: signal("") }), [names.join("|")]);
  const fresh = freshness.value === "live";
  useEffect(() => {
    const abort = new AbortController();
    let whole = false;
    const read = async () => {
      try {
        const query = names.map((name) => `series=${encodeURIComponent(name)}`).join("&");
        const answer = await get(`${ADMIN}/history?${query}&span_s=${spanS}`, { signal: abort.signal });
        made.data.value = columnsOf(answer, names);
        made.refused.value = "";
      } catch (error) {
        if (!abort.signal.aborted && !made.data.peek()[0]?.length) made.refused.value = error instanceof Error ? error.message : String(error);
      }
      whole = true;
    };
    read();
    if (spanS > SHORT_S) {
      const timer = setInterval(read, LONG_EVERY_S * 1000);
      return () => (clearInterval(timer), abort.abort());
    }
    const stop = effect(() => {
      const atS = now.value;
      untracked(() => whole && append(made.data, atS, names, spanS));
    });
    return () => (stop(), abort.abort());
    // After a gap the history has what was missed.
  }, [names.join("|"), spanS, fresh]);
  return made;
}

/** @param {{step_s: number, end_s: number, series: Record<string, (number | null)[]>}} answer @param {string[]} names */
function columnsOf({ step_s: stepS, end_s: endS, series }, names) {
  const length = Math.max(0, ...names.map((name) => series[name]?.length ?? 0));
  const times = Array.from({ length }, (_, place) => endS - (length - 1 - place) * stepS);
  return [times, ...names.map((name) => padded(series[name] ?? [], length))];
}

/** @param {(number | null)[]} column @param {number} length @returns {(number | null)[]} */
const padded = (column, length) => [...Array(length - column.length).fill(null), ...column];

/** @param {Signal<(number | null)[][]>} data @param {number} atS @param {string[]} names @param {number} spanS */
function append(data, atS, names, spanS) {
  const [times = [], ...columns] = data.peek();
  const last = times[times.length - 1];
  if (last != null && atS - last < 0.5) return;
  const cut = times.findIndex((time) => (time ?? 0) > atS - spanS);
  const from = cut < 0 ? times.length : cut;
  data.value = [[...times.slice(from), atS], ...columns.map((column, place) => [...column.slice(from), latest(names[place] ?? "")])];
}

/** Bytes that a model's engine has on all nodes; null where none runs. @param {string} model */
function heldBy(model) {
  const engines = nodes.keys.peek().flatMap((address) => nodes.of(address).peek()?.engines ?? []).filter((engine) => engine.model === model);
  return engines.length ? engines.reduce((sum, engine) => sum + (engine.host_bytes ?? 0) + (engine.device_bytes ?? 0), 0) : null;
}

/** The figure of a series in the live document. @param {string} name @returns {number | null} */
function latest(name) {
  const first = name.indexOf(".");
  const last = name.lastIndexOf(".");
  const [kind, owner, figure] = [name.slice(0, first), name.slice(first + 1, last), name.slice(last + 1)];
  if (kind === "node") {
    const reading = /** @type {any} */ (nodes.of(owner).peek()?.reading);
    return reading?.[OF_READING[figure] ?? figure] ?? null;
  }
  if (figure === "memory_bytes") return heldBy(owner);
  return /** @type {any} */ (models.of(owner).peek()?.rates)?.[figure] ?? null;
}
