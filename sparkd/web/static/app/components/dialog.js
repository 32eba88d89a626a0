// Dialogs: a modal one over the page, and a question with two answers.

import { html, signal, useEffect, useId, useRef } from "../lib.js";

/**
 * @param {{title: string, onClose: () => void, wide?: boolean, children?: any}} props
 */
export function Dialog({ title, onClose, wide = false, children }) {
  const id = useId();
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const before = document.activeElement;
    ref.current?.showModal();
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  return html`<dialog ref=${ref} class=${wide ? "wide" : ""} aria-labelledby=${id} onClose=${onClose}>
    <header class="dialog-head">
      <h2 id=${id}>${title}</h2>
      <button type="button" class="quiet" aria-label="Close" onClick=${() => ref.current?.close()}>✕</button>
    </header>
    ${children}
  </dialog>`;
}

/** @type {Signal<{title: string, text: any, action: string, answer: (yes: boolean) => void} | null>} */
const question = signal(null);

/** Whether the user agrees. @param {string} title @param {any} text @param {string} action the word on the button @returns {Promise<boolean>} */
export const confirmed = (title, text, action) =>
  new Promise((answer) => {
    question.value = { title, text, action, answer };
  });

export function Question() {
  const open = question.value;
  if (!open) return null;
  const end = (/** @type {boolean} */ yes) => {
    open.answer(yes);
    question.value = null;
  };
  return html`<${Dialog} title=${open.title} onClose=${() => end(false)}>
    <p>${open.text}</p>
    <div class="actions">
      <button type="button" class="danger" onClick=${() => end(true)}>${open.action}</button>
      <button type="button" onClick=${() => end(false)}>Cancel</button>
    </div>
  <//>`;
}
