// The page's addresses, which stand behind the hash: #/models/NAME/log.

import { signal } from "./lib.js";

/** The decoded parts of the address. @type {Signal<string[]>} */
export const route = signal(read());

function read() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The address of a page. A model's name is one part, whatever slashes it has. @param {string[]} parts */
export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** @param {string[]} parts */
export function go(...parts) {
  location.hash = to(...parts);
}

addEventListener("hashchange", () => {
  route.value = read();
});
