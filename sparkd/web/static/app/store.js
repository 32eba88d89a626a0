// The live document as signals: one for each node, model and operation, so that a change draws only what shows it.

import { batch, signal } from "./lib.js";

/**
 * The entries of one member of the document.
 * @template T
 */
class Collection {
  constructor() {
    /** In the document's order. @type {Signal<string[]>} */
    this.keys = signal([]);
    /** @type {Map<string, Signal<T | null>>} */
    this.entries = new Map();
  }

  /** The signal of one entry; null while the document has none of this name. @param {string} key @returns {Signal<T | null>} */
  of(key) {
    let entry = this.entries.get(key);
    if (!entry) {
      entry = signal(/** @type {T | null} */ (null));
      this.entries.set(key, entry);
    }
    return entry;
  }

  /** All entries; whoever reads this depends on each. @returns {T[]} */
  all() {
    return this.keys.value.map((key) => this.of(key).value).filter((entry) => entry !== null);
  }

  /** @param {Record<string, T>} members */
  replace(members) {
    for (const [key, entry] of this.entries) {
      if (key in members) continue;
      entry.value = null;
      this.entries.delete(key);
    }
    for (const [key, value] of Object.entries(members)) set(this.of(key), value);
    set(this.keys, Object.keys(members));
  }
}

/** Give a signal a value, unless it has an equal one: then nothing that shows it is drawn again. @template T @param {Signal<T>} target @param {T} value */
function set(target, value) {
  if (JSON.stringify(target.peek()) !== JSON.stringify(value)) target.value = value;
}

/** @type {Collection<LiveNode>} */
export const nodes = new Collection();
/** @type {Collection<LiveModel>} */
export const models = new Collection();
/** @type {Collection<Operation>} */
export const operations = new Collection();
/** The daemon's clock in seconds, with each document. */
export const now = signal(Date.now() / 1000);
/** @type {Signal<{version: string, settled: boolean, draining: boolean} | null>} */
export const daemon = signal(null);
/** @type {Signal<Condition[]>} */
export const conditions = signal([]);
/** @type {Signal<Cable[]>} */
export const cables = signal([]);
/** @type {Signal<number | null>} */
export const lastEvent = signal(null);
/** @type {Signal<string | null>} */
export const lastIncident = signal(null);

/** @param {Record<string, any>} document */
export function takeSnapshot(document) {
  batch(() => {
    nodes.replace(document.nodes);
    models.replace(document.models);
    operations.replace(document.operations);
    now.value = document.at_s;
    set(daemon, { version: document.version, settled: document.settled, draining: document.draining });
    set(conditions, document.conditions);
    set(cables, document.cables);
    lastEvent.value = document.last_event;
    lastIncident.value = document.last_incident;
  });
}

/** The name of a node, as its own host has it. @param {LiveNode} node */
export const hostOf = (node) => node.machine?.host ?? node.node;
