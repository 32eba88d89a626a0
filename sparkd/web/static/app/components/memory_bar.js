// The unified memory of a node as one bar: who holds it, what is free, and where the guard acts.

import { html } from "../lib.js";
import { hostOf } from "../store.js";
import { GIB } from "../units.js";
import { Bar } from "./bar.js";

const ENGINE_COLOURS = 6;

/**
 * The parts of a node's memory, from the left; they add up to its total.
 *
 * The driver's memory stands in no line of /proc/meminfo: engines' device parts are taken out of it, and the rest is unaccounted.
 * A GPU with a memory of its own holds device parts elsewhere; no more than the driver's memory is drawn for them.
 * @param {LiveNode} node
 * @returns {import("./bar.js").Segment[]}
 */
export function memoryParts(node) {
  const reading = node.reading;
  if (!reading) return [];
  const total = reading.mem_total_bytes;
  const free = Math.min(total, reading.mem_free_bytes);
  const cached = Math.min(total - free, reading.cached_bytes);
  let room = total - free - cached;
  const take = (/** @type {number | null | undefined} */ bytes) => {
    const part = Math.max(0, Math.min(room, bytes ?? 0));
    room -= part;
    return part;
  };
  let driver = reading.unaccounted_bytes ?? Infinity;
  const engines = node.engines.flatMap((engine, place) => {
    const kind = `engine-${place % ENGINE_COLOURS}`;
    const device = take(Math.min(engine.device_bytes ?? 0, driver));
    driver -= device;
    return [
      { kind, label: `${engine.model} device`, bytes: device },
      { kind: `${kind} host`, label: `${engine.model} host`, bytes: take(engine.host_bytes) },
    ];
  });
  const held = engines.reduce((sum, part) => sum + part.bytes, 0);
  const returning = take(Math.min(node.returning_bytes, Number.isFinite(driver) ? driver : 0));
  const unaccounted = take(Number.isFinite(driver) ? driver - returning : 0);
  const reserved = Math.max(0, Math.min(free, node.reserved_gib * GIB - held));
  return [
    { kind: "system", label: "system", bytes: room },
    ...engines,
    { kind: "unaccounted", label: "unaccounted", bytes: unaccounted, note: "held by the driver, and by no engine of sparkd" },
    { kind: "returning", label: "not returned yet", bytes: returning, note: "of engines that ended" },
    { kind: "cached", label: "page cache", bytes: cached },
    { kind: "reserved", label: "reserved", bytes: reserved, note: "booked for engines, and not used yet" },
    { kind: "free", label: "free", bytes: free - reserved },
  ];
}

/** @param {{node: LiveNode}} props */
export function MemoryBar({ node }) {
  const reading = node.reading;
  if (!reading) return html`<p class="quiet-text">No reading yet.</p>`;
  const total = reading.mem_total_bytes;
  const { soft, hard, floor } = node.limits ?? {};
  const marks = /** @type {[string, number | null | undefined][]} */ ([["soft", soft], ["hard", hard], ["floor", floor]]).flatMap(([label, bytes]) =>
    bytes == null ? [] : [{ kind: label, label, bytes, at: total - bytes }],
  );
  return html`<${Bar} label="Memory of ${hostOf(node)}" total=${total} segments=${memoryParts(node)} marks=${marks} />`;
}
