// Owns the buttons that load, unload, drain or cancel a model.

import { ADMIN, modelPath, post, remove } from "../api.js";
import { html } from "../lib.js";
import { models } from "../store.js";
import { act } from "./toast.js";

const STARTING = ["PLANNED", "LOADING", "WARMING", "SIZING"];

/** @param {{name: string}} props */
export function ModelActions({ name }) {
  const model = models.of(name).value;
  if (!model) return null;
  const operation = model.operation;
  const button = (/** @type {string} */ text, /** @type {() => Promise<any>} */ action) =>
    html`<button type="button" aria-label="${text} ${name}" onClick=${() => act(action)}>${text}</button>`;
  const starting = STARTING.includes(model.state) || (model.want === "RUNNING" && !["READY", "FAILED"].includes(model.state));
  return html`<span class="row-actions">
    ${(model.want !== "RUNNING" || model.state === "FAILED") && button("Load", () => post(modelPath(name, "/load"), {}))}
    ${starting && operation && button("Cancel", () => remove(`${ADMIN}/operations/${operation}`))}
    ${model.state === "READY" && button("Drain", () => post(modelPath(name, "/drain"), {}))}
    ${(model.want === "RUNNING" || model.state === "FAILED") && !(starting && operation) && button("Unload", () => post(modelPath(name, "/unload"), {}))}
  </span>`;
}
