// The page of requests: those in flight, and those that have ended; never a prompt.

import { ADMIN, get, remove } from "../api.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { act, sentence } from "../components/toast.js";
import { html, useEffect, useMemo, useState } from "../lib.js";
import { to } from "../router.js";
import { models, now } from "../store.js";
import { count, duration, moment, rate, seconds, size, UNKNOWN } from "../units.js";

const EVERY_S = 1;
const PAGE = 200;
/** As many as sparkd keeps. */
const MOST = 10_000;
/** The characters before the month of a moment. */
const YEAR = 5;

/** @typedef {import("../components/table.js").Column<any>} RequestColumn */
/** @type {RequestColumn} */
const MODEL = { head: "Model", value: (one) => one.model, cell: (one) => (one.model && models.keys.value.includes(one.model) ? html`<a href=${to("models", one.model)}>${one.model}</a>` : one.model ?? UNKNOWN) };
/** @type {RequestColumn} */
const KEY = { head: "Key", value: (one) => one.key, cell: (one) => one.key ?? UNKNOWN };
/** @param {{route: string}} one */
const routeOf = (one) => one.route.replace(/^\/v1\//, "");

/** @type {RequestColumn[]} */
const IN_FLIGHT = [
  { head: "Request", name: true, value: (one) => one.request_id, cell: (one) => html`<code>${one.request_id}</code>` },
  { head: "Age", end: true, value: (one) => -one.started_s, cell: (one) => html`<span class="figure">${duration(now.value - one.started_s)}</span>` },
  { head: "Phase", value: (one) => one.phase, cell: (one) => html`<${Word} word=${one.phase} tone=${one.phase === "streaming" ? "good" : "busy"} />` },
  MODEL,
  KEY,
  { head: "Tokens", end: true, hint: "about: the pieces of the stream so far", value: (one) => one.pieces, cell: (one) => html`<span class="figure">${count(one.pieces)}</span>` },
  { head: "Sent", end: true, value: (one) => one.bytes_out, cell: (one) => html`<span class="figure">${size(one.bytes_out)}</span>` },
  { head: "First token", end: true, value: (one) => one.ttft_s, cell: (one) => seconds(one.ttft_s) },
  { head: "Route", value: (one) => one.route, cell: routeOf },
  { head: "", cell: (one) => html`<button type="button" aria-label="Cancel ${one.request_id}" onClick=${() => act(() => remove(`${ADMIN}/requests/${encodeURIComponent(one.request_id)}`), `${one.request_id} was cancelled.`)}>Cancel</button>` },
];

/** @type {RequestColumn[]} */
const FINISHED = [
  { head: "Time", name: true, value: (one) => one.started_s, cell: (one) => html`<span class="figure nowrap" title=${moment(one.started_s)}>${moment(one.started_s).slice(YEAR)}</span>` },
  MODEL,
  KEY,
  { head: "Code", value: (one) => [one.status ?? "gone", one.code].filter(Boolean).join(" "), cell: (one) => html`<${Word} word=${one.status ?? "gone"} tone=${one.failed ? "bad" : "good"} /> ${one.code}` },
  { head: "In", end: true, hint: "tokens of the prompt", value: (one) => one.prompt_tokens, cell: (one) => count(one.prompt_tokens) },
  { head: "Cached", end: true, hint: "of those, from the prefix cache", value: (one) => one.cached_tokens, cell: (one) => count(one.cached_tokens) },
  { head: "Out", end: true, hint: "tokens of the answer", value: (one) => one.completion_tokens, cell: (one) => count(one.completion_tokens) },
  { head: "First token", end: true, value: (one) => one.ttft_s, cell: (one) => seconds(one.ttft_s) },
  { head: "Tokens/s", end: true, value: (one) => one.tokens_per_s, cell: (one) => rate(one.tokens_per_s) },
  { head: "Queued", end: true, value: (one) => one.queued_s, cell: (one) => seconds(one.queued_s) },
  { head: "Took", end: true, value: (one) => one.seconds, cell: (one) => seconds(one.seconds) },
  { head: "Request", value: (one) => `${one.route} ${one.request_id}`, cell: (one) => html`${routeOf(one)}<br /><code class="nowrap">${one.request_id}</code>` },
];

/** @param {string} model */
const queryOf = (model) => new URLSearchParams(model && { model });

export function Requests() {
  const [model, setModel] = useState("");
  const [flight, setFlight] = useState(/** @type {any[]} */ ([]));
  const [finished, setFinished] = useState(/** @type {any[]} */ ([]));
  const [next, setNext] = useState(/** @type {number | null} */ (null));
  const [outcome, setOutcome] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let ended = false;
    let timer = 0;
    /** @type {any[]} */
    let newest = [];
    const look = async () => {
      try {
        const page = await get(`${ADMIN}/requests?limit=${PAGE}&${queryOf(model)}`);
        if (ended) return;
        setFlight(page.in_flight);
        const known = page.finished.findIndex((/** @type {any} */ one) => one.number === newest[0]?.number);
        // More have ended since the last look than a page holds: what is older than the gap is asked for anew.
        if (known < 0) (setFinished(page.finished), setNext(page.next));
        else if (known > 0) setFinished((before) => [...page.finished.slice(0, known), ...before].slice(0, MOST));
        newest = page.finished;
        setProblem("");
      } catch (error) {
        if (!ended) setProblem(sentence(error));
      }
      if (!ended) timer = setTimeout(look, EVERY_S * 1000);
    };
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [model]);
  const more = async () => {
    const page = await act(() => get(`${ADMIN}/requests?limit=${PAGE}&before=${next}&${queryOf(model)}`));
    if (page) (setFinished((before) => [...before, ...page.finished]), setNext(page.next));
  };
  const rows = useMemo(() => finished.filter((one) => outcome === "" || (outcome === "failed") === one.failed), [finished, outcome]);
  return html`<section class="page">
    <div class="page-head"><h1>Requests</h1>
      <select class="slim" aria-label="Model" value=${model} onChange=${(/** @type {any} */ event) => setModel(event.currentTarget.value)}>
        <option value="">All models</option>${models.keys.value.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    </div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <section><h2>In flight</h2>
      <${Table} label="Requests in flight" rows=${flight} columns=${IN_FLIGHT} rowKey=${(/** @type {any} */ one) => `${one.started_s} ${one.request_id}`} empty="No request is in flight." />
    </section>
    <section><h2>Finished</h2>
      <${Table} label="Finished requests" rows=${rows} columns=${FINISHED} rowKey=${(/** @type {any} */ one) => one.number} search="Search requests" empty="No request has ended yet." limit=${2000}
        more=${html`<select class="slim" aria-label="Outcome" value=${outcome} onChange=${(/** @type {any} */ event) => setOutcome(event.currentTarget.value)}>
          <option value="">Any outcome</option><option value="answered">Answered</option><option value="failed">Failed</option></select>`} />
      ${next !== null && html`<div class="actions"><button type="button" onClick=${more}>Older requests</button></div>`}
    </section>
  </section>`;
}
