// The page of events: history, and what happens from now on.

import { ADMIN, get, request } from "../api.js";
import { Word } from "../components/state.js";
import { Table } from "../components/table.js";
import { sentence } from "../components/toast.js";
import { html, useEffect, useMemo, useState } from "../lib.js";
import { to } from "../router.js";
import { eventsOf } from "../sse.js";
import { lastEvent, models } from "../store.js";
import { moment } from "../units.js";

const MOST = 1000;
const AGAIN_S = 2;
/** @type {Record<string, string>} */
const TONES = { incident: "bad", guard: "bad", failed: "bad", error: "bad" };

/** @type {import("../components/table.js").Column<any>[]} */
const COLUMNS = [
  { head: "Time", name: true, value: (event) => event.seq, cell: (event) => html`<span class="figure nowrap">${moment(event.at_s)}</span>` },
  { head: "Kind", value: (event) => event.kind, cell: (event) => html`<${Word} word=${event.kind} tone=${TONES[event.kind] ?? "idle"} />` },
  { head: "Model", value: (event) => event.model, cell: (event) => (event.model ? (models.keys.value.includes(event.model) ? html`<a href=${to("models", event.model)}>${event.model}</a>` : event.model) : "") },
  { head: "Message", value: (event) => event.message, cell: (event) => html`<span class="wide-text">${event.message}</span>` },
];

export function Events() {
  const [events, setEvents] = useState(/** @type {any[]} */ ([]));
  const [kind, setKind] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const abort = new AbortController();
    let last = Math.max(0, (lastEvent.peek() ?? 0) - MOST);
    const add = (/** @type {any[]} */ some) => {
      if (!some.length) return;
      last = some[some.length - 1].seq;
      setEvents((before) => [...[...some].reverse(), ...before].slice(0, MOST));
    };
    const follow = async () => {
      while (!abort.signal.aborted) {
        try {
          const page = await get(`${ADMIN}/events?after=${last}&limit=1000`, { signal: abort.signal });
          add(page.events);
          const response = await request("GET", `${ADMIN}/events?after=${last}`, { headers: { accept: "text/event-stream" }, signal: abort.signal });
          setProblem("");
          for await (const { event, data } of eventsOf(response)) if (event !== "comment") add([JSON.parse(data)].filter((one) => one.seq > last));
        } catch (error) {
          if (!abort.signal.aborted) setProblem(sentence(error));
        }
        await new Promise((resolve) => setTimeout(resolve, AGAIN_S * 1000));
      }
    };
    follow();
    return () => abort.abort();
  }, []);
  const kinds = useMemo(() => [...new Set(events.map((event) => event.kind))].sort(), [events]);
  const matches = useMemo(() => (/** @type {any} */ event) => kind === "" || event.kind === kind, [kind]);
  return html`<section class="page">
    <h1>Events</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <${Table} label="Events" rows=${events} columns=${COLUMNS} rowKey=${(/** @type {any} */ event) => event.seq} matches=${matches} search="Search events" empty="Nothing has happened yet."
      more=${html`<select class="slim" aria-label="Kind" value=${kind} onChange=${(/** @type {any} */ event) => setKind(event.currentTarget.value)}>
        <option value="">All kinds</option>${kinds.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`} />
  </section>`;
}
