// Tables that can be searched and sorted. A row is a component of its own, so a change draws one row, and none off the screen.

import { computed, html, useMemo, useRef, useSignal } from "../lib.js";
import { useVisible } from "../visibility.js";

/**
 * value: what it is sorted and searched by; cell: its markup, drawn again where a signal changes that it reads; end: figures, to the right.
 * @template Row
 * @typedef {{head: string, cell: (row: Row) => any, value?: (row: Row) => string | number | null | undefined, end?: boolean, name?: boolean, hint?: string}} Column
 */

/** @param {{row: any, columns: Column<any>[]}} props */
function TableRow({ row, columns }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const visible = useVisible(ref);
  const drawn = useRef(/** @type {{row: any, columns: Column<any>[], markup: any} | null} */ (null));
  const before = drawn.current;
  if (!visible.value && before?.row === row && before?.columns === columns) return before.markup;
  const markup = html`<tr ref=${ref}>
    ${columns.map((column) =>
      column.name
        ? html`<th key=${column.head} scope="row">${column.cell(row)}</th>`
        : html`<td key=${column.head} class=${column.end ? "end" : ""}>${column.cell(row)}</td>`,
    )}
  </tr>`;
  drawn.current = { row, columns, markup };
  return markup;
}

/**
 * rows: their order is kept where no column is chosen. none: what stands there where rows are, but `matches` takes none of them. search: a label puts a search field above. more: what stands beside it.
 * @param {{
 *   label: string, rows: any[], columns: Column<any>[], rowKey: (row: any) => string | number, search?: string, empty?: any, none?: any, more?: any,
 *   matches?: (row: any) => boolean, first?: {column: number, down?: boolean}, limit?: number
 * }} props
 */
export function Table({ label, rows, columns, rowKey, search, empty = "Nothing here.", none = "Nothing matches.", more, matches, first, limit = 500 }) {
  const text = useSignal("");
  const order = useSignal(/** @type {{column: number, down: boolean} | null} */ (first ? { column: first.column, down: first.down ?? false } : null));
  // The rows in order; the same array for as long as nothing changed places.
  const visible = useMemo(() => {
    /** @type {any[]} */
    let before = [];
    return computed(() => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const valueOf = (/** @type {any} */ row, /** @type {Column<any>} */ column) => column.value?.(row);
      let some = rows.filter((row) => {
        if (matches && !matches(row)) return false;
        if (!words.length) return true;
        const whole = columns.map((column) => valueOf(row, column) ?? "").join(" ").toLowerCase();
        return words.every((word) => whole.includes(word));
      });
      const chosen = order.value;
      const column = chosen && columns[chosen.column];
      if (chosen && column?.value) some = sorted(some, (row) => valueOf(row, column), chosen.down);
      if (some.length !== before.length || some.some((row, place) => row !== before[place])) before = some;
      return before;
    });
  }, [rows, columns, matches]);
  const shown = visible.value;
  const sort = (/** @type {number} */ place) => {
    const now = order.value;
    if (now?.column !== place) order.value = { column: place, down: !!columns[place]?.end };
    else if (now.down === !!columns[place]?.end) order.value = { column: place, down: !now.down };
    else order.value = null;
  };
  return html`<div class="table-block">
    ${(search || more) &&
    html`<div class="table-tools">
      ${search &&
      html`<input type="search" aria-label=${search} placeholder=${search} value=${text} onInput=${(/** @type {any} */ event) => (text.value = event.currentTarget.value)} />`}
      ${more}<span class="quiet-text figure" role="status">${shown.length === rows.length ? "" : `${shown.length} of ${rows.length}`}</span>
    </div>`}
    <div class="table-scroll" role="region" aria-label=${label} tabindex="0">
      <table>
        <caption class="offscreen">${label}</caption>
        <thead>
          <tr>
            ${columns.map((column, place) => {
              const chosen = order.value?.column === place ? (order.value.down ? "descending" : "ascending") : null;
              return html`<th key=${column.head} scope="col" class=${column.end ? "end" : ""} aria-sort=${chosen ?? (column.value ? "none" : null)} title=${column.hint ?? null}>
                ${column.value && column.head
                  ? html`<button type="button" class="head" onClick=${() => sort(place)}>${column.head}<span aria-hidden="true" class="arrow">${chosen ? (order.value?.down ? "▼" : "▲") : ""}</span></button>`
                  : column.head || html`<span class="offscreen">Actions</span>`}
              </th>`;
            })}
          </tr>
        </thead>
        <tbody>
          ${shown.slice(0, limit).map((row) => html`<${TableRow} key=${rowKey(row)} row=${row} columns=${columns} />`)}
        </tbody>
      </table>
    </div>
    ${shown.length === 0 && html`<p class="quiet-text">${rows.length ? (text.value ? "Nothing matches." : none) : empty}</p>`}
    ${shown.length > limit && html`<p class="quiet-text">The first ${limit} of ${shown.length} are shown. Search to narrow them.</p>`}
  </div>`;
}

/**
 * Unknown values come last, whichever way.
 * @template Row
 * @param {Row[]} rows @param {(row: Row) => string | number | null | undefined} value @param {boolean} down
 */
function sorted(rows, value, down) {
  return rows
    .map((row) => /** @type {const} */ ([row, value(row)]))
    .sort(([, a], [, b]) => {
      if (a == null || b == null) return (a == null ? 1 : 0) - (b == null ? 1 : 0);
      const sign = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      return down ? -sign : sign;
    })
    .map(([row]) => row);
}
