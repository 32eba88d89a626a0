// Owns the live document as signals: one for each node, model and operation, so that a change draws only what shows it.

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
    for (const [key, entry] of this.entries) if (!(key in members)) this.#drop(key, entry);
    for (const [key, value] of Object.entries(members)) this.of(key).value = value;
    this.#order(Object.keys(members));
  }

  /** @param {Record<string, unknown>} changes */
  change(changes) {
    let keys = this.keys.peek();
    for (const [key, change] of Object.entries(changes)) {
      if (change === null) {
        this.#drop(key, this.of(key));
        keys = keys.filter((known) => known !== key);
      } else {
        const entry = this.of(key);
        if (entry.peek() === null) keys = [...keys, key];
        entry.value = /** @type {T} */ (merged(entry.peek(), change));
      }
    }
    this.#order(keys);
  }

  /** @param {string} key @param {Signal<T | null>} entry */
  #drop(key, entry) {
    entry.value = null;
    this.entries.delete(key);
  }

  /** @param {string[]} keys */
  #order(keys) {
    const old = this.keys.peek();
    if (old.length !== keys.length || keys.some((key, place) => key !== old[place])) this.keys.value = keys;
  }
}

/** @type {Collection<LiveNode>} */
export const nodes = new Collection();
/** @type {Collection<LiveModel>} */
export const models = new Collection();
/** @type {Collection<Operation>} */
export const operations = new Collection();
/** The daemon's clock in seconds, with each change. */
export const now = signal(Date.now() / 1000);
/** @type {Signal<{boot: string, version: string, settled: boolean, draining: boolean} | null>} */
export const daemon = signal(null);
/** @type {Signal<Condition[]>} */
export const conditions = signal([]);
/** @type {Signal<Cable[]>} */
export const cables = signal([]);
/** @type {Signal<number | null>} */
export const lastEvent = signal(null);
/** @type {Signal<string | null>} */
export const lastIncident = signal(null);

/** @type {Record<string, any>} */
let rest = {};

/** @param {Record<string, any>} document */
export function takeSnapshot(document) {
  batch(() => {
    const { nodes: someNodes, models: someModels, operations: someOperations, ...others } = document;
    nodes.replace(someNodes ?? {});
    models.replace(someModels ?? {});
    operations.replace(someOperations ?? {});
    rest = others;
    spread();
  });
}

/** @param {Record<string, any>} patch a JSON merge patch (RFC 7396) against the document before */
export function takeChange(patch) {
  batch(() => {
    const { nodes: someNodes, models: someModels, operations: someOperations, ...others } = patch;
    if (someNodes) nodes.change(someNodes);
    if (someModels) models.change(someModels);
    if (someOperations) operations.change(someOperations);
    rest = merged(rest, others);
    spread();
  });
}

function spread() {
  now.value = rest.at_s ?? now.value;
  const old = daemon.peek();
  if (!old || ["boot", "version", "settled", "draining"].some((name) => rest[name] !== /** @type {any} */ (old)[name])) {
    daemon.value = { boot: rest.boot, version: rest.version, settled: rest.settled, draining: rest.draining };
  }
  // A member that did not change is the same object, and its signal stays quiet.
  conditions.value = rest.conditions ?? conditions.peek();
  cables.value = rest.cables ?? cables.peek();
  lastEvent.value = rest.events?.last_seq ?? null;
  lastIncident.value = rest.incidents?.last_id ?? null;
}

/**
 * A value after a merge patch; parts that the patch does not name are the same objects.
 * @param {any} value
 * @param {any} patch
 * @returns {any}
 */
export function merged(value, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = value !== null && typeof value === "object" && !Array.isArray(value) ? { ...value } : {};
  for (const [key, change] of Object.entries(patch)) {
    if (change === null) delete result[key];
    else result[key] = merged(result[key], change);
  }
  return result;
}
