// How figures read, with the words and units of the command line: GiB, GB/s, tokens/s, 42s, 3m.

export const GIB = 2 ** 30;
export const MIB = 2 ** 20;
/** The text of an unknown figure, which is never 0. */
export const UNKNOWN = "-";

/** @typedef {number | null | undefined} Figure */

/** @param {Figure} value */
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** @param {(value: number) => string} text @returns {(value: Figure) => string} */
const orDash = (text) => (value) => (known(value) ? text(/** @type {number} */ (value)) : UNKNOWN);

/** @param {number} value @param {number} [digits] */
const fixed = (value, digits = 0) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** 1,234 */
export const count = orDash((value) => fixed(value));
/** 12.3, for figures whose unit stands in the head of their column. */
export const decimal = orDash((value) => fixed(value, 1));
/** 12.3 GiB, of any size, so that a column of them lines up. */
export const gib = orDash((bytes) => `${fixed(bytes / GIB, 1)} GiB`);
/** 1.50 GiB, 213.4 MiB, 12 KiB, 96 B */
export const size = orDash((bytes) => {
  if (bytes >= GIB) return `${fixed(bytes / GIB, 2)} GiB`;
  if (bytes >= MIB) return `${fixed(bytes / MIB, 1)} MiB`;
  return bytes >= 1024 ? `${fixed(bytes / 1024, 1).replace(/\.0$/, "")} KiB` : `${Math.round(bytes)} B`;
});
/** 5.82 GB/s */
export const bandwidth = orDash((bytesPerS) => `${fixed(bytesPerS / 1e9, 2)} GB/s`);
/** 50% */
export const percent = orDash((fraction) => `${fixed(fraction * 100)}%`);
/** 35.2 tokens/s */
export const tokensPerS = orDash((rate) => `${rate >= 100 ? fixed(rate) : fixed(rate, 1)} tokens/s`);
/** The same without its unit. */
export const rate = orDash((value) => (value >= 100 ? fixed(value) : fixed(value, 1)));
export const watts = orDash((value) => `${fixed(value, 1)} W`);
export const celsius = orDash((value) => `${fixed(value)} °C`);
export const megahertz = orDash((value) => `${fixed(value)} MHz`);
export const joules = orDash((value) => `${value >= 10 ? fixed(value, 1) : fixed(value, 2)} J`);

/** 42s, 3m, 5h, 12d: the largest whole unit that keeps two digits where it can. */
export const duration = orDash((seconds) => {
  for (const [unit, length] of /** @type {[string, number][]} */ ([["d", 86400], ["h", 3600], ["m", 60]])) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)}${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))}s`;
});
/** 180 ms, 2.41 s, 93 s */
export const seconds = orDash((value) => {
  if (value < 1) return `${fixed(value * 1000)} ms`;
  return value < 10 ? `${fixed(value, 2)} s` : `${fixed(value, value < 100 ? 1 : 0)} s`;
});

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-CA", { year: "numeric", month: "2-digit", day: "2-digit" });
/** 14:05:09, local time of the browser. */
export const clock = orDash((atS) => CLOCK.format(atS * 1000));
/** 2026-03-01 14:05:09 */
export const moment = orDash((atS) => `${DAY.format(atS * 1000)} ${CLOCK.format(atS * 1000)}`);

/** @param {number} number @param {string} noun */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** @type {Record<string, string>} */
const STAGES = {
  STOPPED: "about to begin",
  PLANNED: "finding room",
  LOADING: "loading",
  WARMING: "warming up",
  SIZING: "sizing the KV cache",
  READY: "ready",
  DRAINING: "finishing its requests",
  STOPPING: "stopping",
  FAILED: "failed",
};

/**
 * `loading 50% as nvfp4, 31.7 of 63.4 GiB, 5.82 GB/s, about 5 s left`: only what is known, as `sparkd ps` says it.
 * @param {string} state
 * @param {Progress | null | undefined} progress
 */
export function stage(state, progress) {
  const facts = progress && ["LOADING", "WARMING", "SIZING"].includes(state) ? progress : null;
  let words = STAGES[state] ?? state.toLowerCase();
  if (!facts) return words;
  const kv = facts.kv ?? {};
  if (state === "SIZING" && kv.phase === "rehearsing" && (kv.source ?? "rehearsal") === "rehearsal") {
    words = "rehearsing the largest batches, to size the KV cache";
  }
  if (state === "LOADING" && facts.phase === "starting") words = "starting its engine";
  if (state === "LOADING" && facts.source === "calibration") words = "measuring the inputs of its layers over a text, once";
  if (known(facts.fraction) && facts.phase === "loading") {
    const origin = facts.source === "cache" ? " from the quantized cache" : facts.format ? ` as ${facts.format}` : "";
    words += ` ${percent(facts.fraction)}${origin}`;
  }
  const parts = [words];
  if (state === "LOADING") parts.push(...amounts(facts));
  if (known(facts.kv_tokens)) parts.push(`KV cache of ${count(facts.kv_tokens)} tokens`);
  if (known(facts.eta_s)) parts.push(`about ${fixed(/** @type {number} */ (facts.eta_s))} s left`);
  if (facts.cache_state === "writing" && facts.cache_why) parts.push(facts.cache_why);
  return parts.join(", ");
}

/** @param {Progress} facts */
export function amounts(facts) {
  const parts = [];
  if (facts.bytes_total && known(facts.bytes_done)) {
    const [unit, name] = facts.bytes_total >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
    parts.push(`${fixed(/** @type {number} */ (facts.bytes_done) / unit, 1)} of ${fixed(facts.bytes_total / unit, 1)} ${name}`);
  }
  if (facts.bytes_per_s) parts.push(bandwidth(facts.bytes_per_s));
  if (facts.units_total && known(facts.units_done)) parts.push(`${facts.units_done} of ${facts.units_total} units`);
  return parts;
}
