// Labelled fields, with the daemon's refusal at the field that it concerns.

import { html, useId } from "../lib.js";

/**
 * @param {{
 *   label: string, value: string, onInput: (value: string) => void, error?: string | null, hint?: any, type?: string, options?: (string | [string, string])[],
 *   list?: string[], rows?: number, required?: boolean, placeholder?: string, min?: number, max?: number, step?: string, autocomplete?: string, mono?: boolean
 * }} props options: of a choice; list: what is suggested; rows: of a text of several lines
 */
export function Field({ label, value, onInput, error, hint, options, list, rows, mono, type = "text", ...rest }) {
  const id = useId();
  const notes = [error && `${id}-error`, hint && `${id}-hint`].filter(Boolean).join(" ");
  const common = {
    id,
    ...rest,
    value,
    class: mono ? "mono" : "",
    "aria-invalid": error ? "true" : null,
    "aria-describedby": notes || null,
    spellcheck: false,
    onInput: (/** @type {any} */ event) => onInput(event.currentTarget.value),
  };
  let control;
  if (options) {
    control = html`<select ...${common}>
      ${options.map((option) => {
        const [key, text] = typeof option === "string" ? [option, option] : option;
        return html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`;
      })}
    </select>`;
  } else if (rows) control = html`<textarea rows=${rows} ...${common}></textarea>`;
  else control = html`<input type=${type} list=${list ? `${id}-list` : null} autocomplete="off" ...${common} />`;
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${control} ${list && html`<datalist id="${id}-list">${list.map((option) => html`<option key=${option} value=${option} />`)}</datalist>`}
    ${error && html`<p class="error" id="${id}-error" role="alert">${error}</p>`} ${hint && html`<p class="hint" id="${id}-hint">${hint}</p>`}
  </div>`;
}

/** @param {{label: string, checked: boolean, onChange: (checked: boolean) => void}} props */
export const Check = ({ label, checked, onChange }) =>
  html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(/** @type {any} */ event) => onChange(event.currentTarget.checked)} /> ${label}</label>`;
