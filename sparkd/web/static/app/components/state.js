// How states and verdicts look: a colour and always a word.

import { html, useComputed } from "../lib.js";
import { now } from "../store.js";
import { duration, moment, percent, stage } from "../units.js";

/** @type {Record<string, string>} */
const TONES = { READY: "good", FAILED: "bad", STOPPED: "idle", ok: "good", warn: "busy", fail: "bad", tight: "busy", pressed: "busy", critical: "bad" };

const STARTING = ["PLANNED", "LOADING", "WARMING", "SIZING"];
/** Whether a start of the model is under way. @param {{state: string} | null | undefined} model */
export const isStarting = (model) => STARTING.includes(model?.state ?? "");

/** A coloured word. @param {{word: string, tone?: string}} props */
export const Word = ({ word, tone }) => html`<span class="word ${tone ?? TONES[word] ?? "busy"}">${word}</span>`;

/** A model's state, as `sparkd ps` prints it. @param {{model: {state: string, turn?: number | null, doubt?: string | null, progress?: Progress | null}}} props */
export function State({ model }) {
  if (model.turn != null) return html`<${Word} word="WAITS ${model.turn}" tone="busy" />`;
  if (model.doubt && model.state === "READY") return html`<${Word} word="SUSPECT" tone="busy" />`;
  const fraction = model.state === "LOADING" ? model.progress?.fraction : null;
  return html`<${Word} word=${model.state + (fraction == null ? "" : ` ${percent(fraction)}`)} tone=${TONES[model.state] ?? "busy"} />`;
}

/** What a start is about, how far it is, and for how long. @param {{name: string, model: LiveModel}} props */
export const Start = ({ name, model }) => html`<${Progress} fraction=${model.progress?.fraction} label="Progress of ${name}" />
  <span class="quiet-text figure" role="status">${stage(model.state, model.progress)}, <${Since} atS=${model.since_s} /> so far</span>`;

/** When a model failed, and when it is tried again. @param {{model: LiveModel}} props */
export const Tries = ({ model }) =>
  model.state === "FAILED" && html`${" "}It failed at ${moment(model.since_s)}.${model.retry_in_s != null && html` Next try in <span class="figure">${duration(model.retry_in_s)}</span>.`}`;

/** How the try before this one ended. @param {{failure: any}} props */
export const LastFailure = ({ failure }) => html`It failed at ${moment(failure.at_s)}: <b>${failure.reason}</b>: ${failure.message}`;

/** For how long, by the daemon's clock; drawn again only when its text changes. @param {{atS: number | null | undefined}} props */
export function Since({ atS }) {
  const text = useComputed(() => (atS == null ? "-" : duration(now.value - atS)));
  return html`<span class="figure">${text}</span>`;
}

/** How far something is; without a fraction, that it goes on. @param {{fraction: number | null | undefined, label: string}} props */
export const Progress = ({ fraction, label }) =>
  fraction == null ? html`<progress aria-label=${label}></progress>` : html`<progress max="1" value=${fraction} aria-label=${label}>${percent(fraction)}</progress>`;
