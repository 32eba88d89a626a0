// The button that copies a text.

import { html, useState } from "../lib.js";

/** @param {{text: string | (() => string), label?: string}} props */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copied(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="copy" onClick=${copy}>
    <span class=${done ? "hidden" : ""}>${label}</span><span class=${done ? "" : "hidden"} role="status">${done ? "Copied" : ""}</span>
  </button>`;
}

/** The clipboard of a page by plain HTTP from another host has no API. @param {string} text */
async function copied(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "offscreen";
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
