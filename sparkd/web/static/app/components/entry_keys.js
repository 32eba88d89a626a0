// The editor of an entry's keys, which stands in the browser until the daemon takes it.

import { paramOf } from "../api.js";
import { html } from "../lib.js";
import { shown, typed } from "../yaml.js";
import { Field } from "./form.js";

/**
 * One row of the editor: a key, and its value as it is typed.
 * @typedef {{key: string, text: string}} Row
 */

/** @param {Record<string, unknown>} spec @returns {Row[]} */
export const rowsOf = (spec) => Object.entries(spec).map(([key, value]) => ({ key, text: shown(value) }));
/** @param {Row[]} rows @returns {Record<string, unknown>} */
export const specOf = (rows) => Object.fromEntries(rows.filter((row) => row.key.trim()).map((row) => [row.key.trim(), typed(row.text)]));

/** The key that a refusal is about, and "" for one about none of these rows. @param {unknown} refusal @param {Row[]} rows */
export function keyOf(refusal, rows) {
  const param = paramOf(refusal);
  return rows.some((row) => row.key.trim() === param) ? param : "";
}

/** keys: those that an added model may have. @param {{keys: string[], rows: Row[], onChange: (rows: Row[]) => void, refusal: unknown}} props */
export function EntryKeys({ keys, rows, onChange, refusal }) {
  const wrong = keyOf(refusal, rows);
  const set = (/** @type {number} */ place, /** @type {Partial<Row>} */ change) => onChange(rows.map((row, other) => (other === place ? { ...row, ...change } : row)));
  // A refusal about a key that no entry has, or that may not be set here, is about the key itself.
  const errorAt = (/** @type {Row} */ row, /** @type {boolean} */ known) =>
    wrong && row.key.trim() === wrong && keys.includes(wrong) === known ? /** @type {Error} */ (refusal).message : null;
  return html`<fieldset class="stack">
    <legend>Keys</legend>
    ${rows.map(
      (row, place) => html`<div class="key-row" key=${place}>
        <${Field} label="Key" value=${row.key} list=${keys} mono onInput=${(/** @type {string} */ key) => set(place, { key })} error=${errorAt(row, false)} />
        <${Field} label="Value" value=${row.text} mono onInput=${(/** @type {string} */ text) => set(place, { text })} error=${errorAt(row, true)} />
        <button type="button" aria-label="Remove key ${row.key}" onClick=${() => onChange(rows.filter((_, other) => other !== place))}>✕</button>
      </div>`,
    )}
    <div class="actions">
      <button type="button" onClick=${() => onChange([...rows, { key: "", text: "" }])}>Add key</button>
      <span class="hint">A value is JSON, or else text.</span>
    </div>
  </fieldset>`;
}
