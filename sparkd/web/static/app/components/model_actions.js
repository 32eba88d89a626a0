// The buttons that load a model, unload it after its requests, or cancel what it is about to do.

import { ADMIN, modelPath, post, remove } from "../api.js";
import { html, useComputed } from "../lib.js";
import { models } from "../store.js";
import { isStarting } from "./state.js";
import { act } from "./toast.js";

/** @param {{name: string}} props */
export function ModelActions({ name }) {
  // A text, so that the buttons are drawn again only where they change.
  const facts = useComputed(() => {
    const model = models.of(name).value;
    return model ? JSON.stringify({ state: model.state, want: model.want, operation: model.operation }) : "";
  }).value;
  if (!facts) return null;
  const model = JSON.parse(facts);
  const operation = model.operation;
  const button = (/** @type {string} */ text, /** @type {() => Promise<any>} */ action, hint = "") =>
    html`<button type="button" aria-label="${text} ${name}" title=${hint || null} onClick=${() => act(action)}>${text}</button>`;
  const starting = isStarting(model) || (model.want === "RUNNING" && !["READY", "FAILED"].includes(model.state));
  return html`<span class="row-actions">
    ${(model.want !== "RUNNING" || model.state === "FAILED") && button("Load", () => post(modelPath(name, "/load"), {}))}
    ${starting && operation && button("Cancel", () => remove(`${ADMIN}/operations/${operation}`))}
    ${(model.want === "RUNNING" || model.state === "FAILED") && !(starting && operation) && button("Unload", () => post(modelPath(name, "/unload"), {}), "Requests in flight may finish first.")}
  </span>`;
}
