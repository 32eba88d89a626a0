// The short messages at the edge of the page: what an action came to, and refusals that belong to no field.

import { Refused } from "../api.js";
import { effect, html, signal } from "../lib.js";
import { operations } from "../store.js";

const SHOWN_S = 8;
const MOST = 5;
let last = 0;
/** @type {Signal<{id: number, text: string, bad: boolean}[]>} */
const shown = signal([]);

/** @param {string} text @param {boolean} [bad] a refusal or failure, which stays until it is dismissed */
export function say(text, bad = false) {
  const id = ++last;
  // Without a dependency: an effect may say something.
  shown.value = [...shown.peek().slice(1 - MOST), { id, text, bad }];
  if (!bad) setTimeout(() => dismiss(id), SHOWN_S * 1000);
}

/** @param {number} id */
function dismiss(id) {
  shown.value = shown.peek().filter((toast) => toast.id !== id);
}

/** The sentence of a refusal; anything else is a fault of this page. @param {unknown} error */
export const sentence = (error) => (error instanceof Refused ? error.message : `The page made an error: ${error}`);

/**
 * Do something that may be refused, and say so. An operation is followed to its end.
 * @param {() => Promise<any>} action
 * @param {string} [done] said after success
 */
export async function act(action, done) {
  try {
    const answer = await action();
    if (typeof answer?.operation === "string") follow(answer.operation, `${answer.kind} ${answer.model}`.trim());
    if (done) say(done);
    return answer;
  } catch (error) {
    if (!(error instanceof Refused && error.status === 401)) say(sentence(error), true);
    return null;
  }
}

/** Say how an operation ended, once the live document knows. @param {string} id @param {string} name */
export function follow(id, name) {
  const stop = effect(() => {
    const operation = operations.of(id).value;
    if (!operation || operation.state === "RUNNING") return;
    if (operation.state === "FAILED") say(`${name}: ${operation.message}`, true);
    else if (operation.state === "CANCELLED") say(`${name} was cancelled.`);
    else say(`${name}: ${operation.message || "done"}`);
    queueMicrotask(() => stop());
  });
}

export function Toasts() {
  const some = shown.value;
  const list = (/** @type {boolean} */ bad) =>
    some.filter((toast) => toast.bad === bad).map(
      (toast) => html`<div key=${toast.id} class=${bad ? "toast bad" : "toast"}>
        <span>${bad && html`<b>Failed. </b>`}${toast.text}</span>
        <button type="button" class="quiet" aria-label="Dismiss" onClick=${() => dismiss(toast.id)}>✕</button>
      </div>`,
    );
  return html`<div class="toasts">
    <div role="alert">${list(true)}</div>
    <div role="status">${list(false)}</div>
  </div>`;
}
