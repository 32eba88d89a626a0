// The connection to the live stream: waits longer after each failure, and says how old the figures are.

import { ADMIN, access, narrowAccess, Refused, request } from "./api.js";
import { signal } from "./lib.js";
import { eventsOf } from "./sse.js";
import { takeSnapshot } from "./store.js";

const STALE_S = 5;
const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 5;
// The daemon writes every second, and every other one while it waits for a node.
const SILENT_S = 20;

/** `old`: the figures are older than 5 s. @type {Signal<"connecting" | "live" | "old">} */
export const freshness = signal("connecting");
/** Whole seconds since the last document came; 0 while figures are fresh. */
export const ageS = signal(0);
/** The sentence of a refusal that waiting does not end, such as a foreign Host. */
export const liveRefusal = signal("");

/** Why the stream does not come just now, as the daemon says it. */
export const liveProblem = signal("");

let changedAt = 0;
let heardAt = 0;
/** @type {AbortController | null} */
let running = null;

/** Follow the stream for as long as the page is open, or until a key is needed. */
export function startLive() {
  stopLive();
  const abort = new AbortController();
  running = abort;
  liveRefusal.value = "";
  follow(abort);
}

export function stopLive() {
  running?.abort();
  running = null;
}

/** @param {AbortController} whole */
async function follow(whole) {
  let waitS = FIRST_WAIT_S;
  while (!whole.signal.aborted) {
    const one = new AbortController();
    const end = () => one.abort();
    whole.signal.addEventListener("abort", end);
    heardAt = Date.now();
    const watch = setInterval(() => {
      if (Date.now() - heardAt > SILENT_S * 1000) one.abort();
    }, 1000);
    try {
      const response = await request("GET", `${ADMIN}/live`, { headers: { accept: "text/event-stream" }, signal: one.signal });
      access.value = "admin";
      liveProblem.value = "";
      for await (const { data } of eventsOf(response)) {
        takeSnapshot(JSON.parse(data));
        waitS = FIRST_WAIT_S;
        heardAt = changedAt = Date.now();
        look();
      }
    } catch (error) {
      if (await ends(error)) return;
    } finally {
      clearInterval(watch);
      one.abort();
      whole.signal.removeEventListener("abort", end);
    }
    await new Promise((resolve) => setTimeout(resolve, waitS * 1000));
    waitS = Math.min(LONGEST_WAIT_S, waitS * 2);
  }
}

/** Whether another try would end the same. @param {unknown} error */
async function ends(error) {
  if (!(error instanceof Refused)) return false;
  liveProblem.value = error.message;
  if (error.status === 401) return true;
  if (error.status !== 403) return false;
  try {
    await narrowAccess(error);
  } catch (other) {
    // What the key opens is not known yet where sparkd does not answer, or not now.
    if (!(other instanceof Refused && [401, 403].includes(other.status))) return false;
    liveRefusal.value = error.message;
  }
  return true;
}

function look() {
  const age = changedAt ? (Date.now() - changedAt) / 1000 : 0;
  freshness.value = changedAt === 0 ? "connecting" : age > STALE_S ? "old" : "live";
  ageS.value = age > STALE_S ? Math.floor(age) : 0;
}

setInterval(look, 500);
