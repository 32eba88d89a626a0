// Bars whose parts add up to a whole, with a legend that gives every figure as text.

import { html } from "../lib.js";
import { gib } from "../units.js";

const WIDTH = 1000;
const HEIGHT = 20;

/**
 * kind: its colour, a class of style.css. bytes: 0 is neither drawn nor listed.
 * @typedef {{kind: string, label: string, bytes: number, note?: string}} Segment
 * @typedef {{kind: string, label: string, bytes: number, at: number}} Mark at: bytes from the left
 */

/** @param {{label: string, total: number, segments: Segment[], marks?: Mark[], text?: (bytes: number) => string}} props */
export function Bar({ label, total, segments, marks = [], text = gib }) {
  let left = 0;
  const parts = segments.filter((segment) => segment.bytes > 0).map((segment) => {
    const place = { ...segment, x: (left / total) * WIDTH, width: (segment.bytes / total) * WIDTH };
    left += segment.bytes;
    return place;
  });
  const summary = `${label}: ${parts.map((part) => `${part.label} ${text(part.bytes)}`).join(", ")}; of ${text(total)}`;
  return html`<div class="bar">
    <svg role="img" aria-label=${summary} viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" class="bar-picture">
      ${parts.map(
        (part) => html`<rect key=${part.label} class="part ${part.kind}" x=${part.x} y="0" width=${part.width} height=${HEIGHT}><title>${part.label} ${text(part.bytes)}</title></rect>`,
      )}
      ${marks.map((mark) => {
        const x = Math.max(0, Math.min(WIDTH, (mark.at / total) * WIDTH));
        return html`<line key=${mark.label} class="mark ${mark.kind}" x1=${x} x2=${x} y1="0" y2=${HEIGHT}><title>${mark.label} ${text(mark.bytes)}</title></line>`;
      })}
    </svg>
    <ul class="legend">
      ${parts.map(
        (part) => html`<li key=${part.label}>
          <svg class="swatch" viewBox="0 0 10 10" aria-hidden="true"><rect class="part ${part.kind}" width="10" height="10" /></svg>
          <span class="legend-label" title=${part.note ?? part.label}>${part.label}</span> <span class="figure">${text(part.bytes)}</span>
        </li>`,
      )}
      ${marks.map(
        (mark) => html`<li key=${mark.label}>
          <svg class="swatch" viewBox="0 0 10 10" aria-hidden="true"><line class="mark ${mark.kind}" x1="5" x2="5" y1="0" y2="10" /></svg>
          <span class="legend-label">${mark.label}</span> <span class="figure">${text(mark.bytes)}</span>
        </li>`,
      )}
    </ul>
  </div>`;
}
