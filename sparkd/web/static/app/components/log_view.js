// The view of a log: its last lines, colours of ANSI sequences, pause and search.

import { html, useEffect, useRef, useState } from "../lib.js";

const MOST_LINES = 5000;
const EVERY_S = 1;
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];
const SEQUENCE = /\x1b\[([0-9;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/g;

/**
 * read: whole lines after a cursor, and the next cursor.
 * @param {{label: string, read: (cursor: string | null) => Promise<{text: string, cursor: string}>, restart: string}} props restart: a new value begins anew
 */
export function LogView({ label, read, restart }) {
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [paused, setPaused] = useState(false);
  const [search, setSearch] = useState("");
  const [problem, setProblem] = useState("");
  const still = useRef(false);
  const words = useRef("");
  still.current = paused;
  words.current = search.toLowerCase();
  useEffect(() => {
    let cursor = /** @type {string | null} */ (null);
    let ended = false;
    let timer = 0;
    list.current?.replaceChildren();
    const look = async () => {
      if (!still.current) {
        try {
          const page = await read(cursor);
          if (ended) return;
          cursor = page.cursor;
          if (list.current && page.text) append(list.current, page.text, words.current);
          setProblem("");
        } catch (error) {
          setProblem(error instanceof Error ? error.message : String(error));
        }
      }
      if (!ended) timer = setTimeout(look, EVERY_S * 1000);
    };
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [restart]);
  useEffect(() => {
    if (list.current) for (const line of list.current.children) match(/** @type {HTMLElement} */ (line), search.toLowerCase());
  }, [search]);
  return html`<div class="log-block">
    <div class="table-tools">
      <input type="search" aria-label="Search the log" placeholder="Search the log" value=${search} onInput=${(/** @type {any} */ event) => setSearch(event.currentTarget.value)} />
      <button type="button" aria-pressed=${paused ? "true" : "false"} onClick=${() => setPaused(!paused)}>${paused ? "Resume" : "Pause"}</button>
    </div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="log" role="log" aria-live="off" aria-label=${label} tabindex="0" ref=${list}></div>
  </div>`;
}

/** @param {HTMLElement} list @param {string} text @param {string} words */
function append(list, text, words) {
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const lines = text.replace(/\n$/, "").split("\n").slice(-MOST_LINES);
  const some = document.createDocumentFragment();
  for (const line of lines) {
    const row = document.createElement("div");
    row.append(...spansOf(line.replace(/\r$/, "").replace(/^.*\r/, "")));
    match(row, words);
    some.append(row);
  }
  list.append(some);
  while (list.childElementCount > MOST_LINES) list.firstElementChild?.remove();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

/** @param {HTMLElement} row @param {string} words */
function match(row, words) {
  row.hidden = words !== "" && !(row.textContent ?? "").toLowerCase().includes(words);
}

/** A line as nodes: the colours of its ANSI sequences become classes, other sequences go. @param {string} line */
export function spansOf(line) {
  /** @type {Node[]} */
  const parts = [];
  let classes = /** @type {string[]} */ ([]);
  let from = 0;
  const add = (/** @type {string} */ text) => {
    const clean = text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g, "");
    if (!clean) return;
    if (!classes.length) return parts.push(document.createTextNode(clean));
    const span = document.createElement("span");
    span.className = classes.join(" ");
    span.textContent = clean;
    parts.push(span);
  };
  for (const found of line.matchAll(SEQUENCE)) {
    add(line.slice(from, found.index));
    from = found.index + found[0].length;
    if (found[2] === "m") classes = styled(classes, (found[1] || "0").split(";").map(Number));
  }
  add(line.slice(from));
  return parts;
}

/** The classes after a sequence of SGR codes (ECMA-48 8.3.117). @param {string[]} classes @param {number[]} codes */
function styled(classes, codes) {
  for (let place = 0; place < codes.length; place++) {
    const code = codes[place] ?? 0;
    if (code === 0) classes = [];
    else if (code === 1) classes = [...classes, "ansi-bold"];
    else if (code === 2) classes = [...classes, "ansi-dim"];
    else if (code === 22) classes = classes.filter((one) => one !== "ansi-bold" && one !== "ansi-dim");
    else if (code === 38 || code === 48) place += codes[place + 1] === 5 ? 2 : 4;
    else if (code === 39) classes = classes.filter((one) => !one.startsWith("ansi-fg"));
    else {
      const number = code >= 90 && code <= 97 ? code - 90 : code >= 30 && code <= 37 ? code - 30 : -1;
      if (number >= 0) classes = [...classes.filter((one) => !one.startsWith("ansi-fg")), `ansi-fg-${COLOURS[number]}`];
    }
  }
  return classes;
}
