// The page of benches: the form that starts one, the one that runs, and the earlier ones.

import { ADMIN, paramOf, post, remove } from "../api.js";
import { removed, runningBench, useBench, useBenches, USED } from "../components/bench_actions.js";
import { BenchState, Cells, LoadsAndFormats } from "../components/bench_figures.js";
import { Check, Field } from "../components/form.js";
import { useAnswer, Waiting } from "../components/loaded.js";
import { Progress } from "../components/state.js";
import { Table } from "../components/table.js";
import { act, follow, sentence } from "../components/toast.js";
import { html, signal, useMemo, useState } from "../lib.js";
import { go, route, to } from "../router.js";
import { models } from "../store.js";
import { moment, percent, plural, rate, UNKNOWN } from "../units.js";
import { Compared } from "./bench_compare.js";
import { Result } from "./bench_result.js";

const FIRST_PROFILE = "quick";
/** What a bench may measure. */
const KINDS = [["speed", "speed"], ["load", "loads and swaps"], ["quality", "quality of formats"]];
/** The choice of a profile that none of the shipped ones is. */
const OWN = "own";

/** #/bench, #/bench/ID for one, #/bench/A/B for two. */
export function Bench() {
  const [, a, b] = route.value;
  if (a && b) return html`<${Compared} key=${`${a} ${b}`} a=${a} b=${b} />`;
  return a ? html`<${Result} key=${a} id=${a} />` : html`<${Benches} />`;
}

function Benches() {
  const operation = runningBench();
  const { answer, problem, busy, again } = useBenches(operation?.id);
  /** @type {any[]} */
  const rows = answer?.benches ?? [];
  const running = operation && rows.find((row) => row.state === "running");
  return html`<section class="page">
    <div class="page-head"><h1>Bench</h1><button type="button" onClick=${again} disabled=${busy}>Look again</button></div>
    <p class="quiet-text">How fast a model is, what a token costs in joules, how long a load takes, and what a format costs in accuracy.</p>
    ${operation && html`<${Running} key=${operation.id} operation=${operation} id=${running?.id} />`}
    <${StartForm} onStarted=${again} />
    <section><h2>Earlier benches</h2>
      <${Waiting} problem=${problem} busy=${busy} empty=${!answer} />
      ${answer && html`<${Earlier} rows=${rows.filter((row) => row !== running)} again=${again} />`}
    </section>
  </section>`;
}

/** The one that runs: how far it is, and its cells so far. @param {{operation: Operation, id: string | undefined}} props */
function Running({ operation, id }) {
  const name = `bench ${operation.model}`;
  return html`<section aria-label="Under way"><h2>Under way</h2>
    <div class="page-head"><span role="status"><b>${operation.model}</b>${operation.message ? `: ${operation.message}` : ""}</span>
      <span class="figure">${operation.progress?.fraction == null ? "" : percent(operation.progress.fraction)}</span>
      <button type="button" aria-label="Cancel ${name}" onClick=${() => act(() => remove(`${ADMIN}/operations/${operation.id}`))}>Cancel</button></div>
    <${Progress} fraction=${operation.progress?.fraction} label="Progress of ${name}" />
    ${id && html`<${LiveCells} id=${id} />`}
  </section>`;
}

/** @param {{id: string}} props */
function LiveCells({ id }) {
  const { answer, problem, busy } = useBench(id);
  return html`<${Waiting} problem=${problem} busy=${busy} empty=${!answer} />${answer && (answer.kind === "speed" ? html`<${Cells} result=${answer} />` : html`<${LoadsAndFormats} result=${answer} />`)}`;
}

/** @param {{onStarted: () => void}} props */
function StartForm({ onStarted }) {
  const { answer, problem } = useAnswer(`${ADMIN}/bench/profiles`);
  const names = models.keys.value;
  // At first one that is ready, which costs no load.
  const [model, setModel] = useState(() => models.keys.peek().find((name) => models.of(name).peek()?.state === "READY") ?? "");
  const [profile, setProfile] = useState(FIRST_PROFILE);
  const [own, setOwn] = useState("");
  const [kind, setKind] = useState("speed");
  const [times, setTimes] = useState("3");
  const [other, setOther] = useState("");
  const [force, setForce] = useState(false);
  const [refusal, setRefusal] = useState(/** @type {unknown} */ (null));
  const [busy, setBusy] = useState(false);
  /** @type {any[]} */
  const profiles = answer?.profiles ?? [];
  const about = profiles.find((one) => one.name === profile);
  const subject = names.includes(model) ? model : names[0] ?? "";
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setRefusal(null);
    try {
      /** @type {Record<string, any>} */
      const chosen = { speed: profile === OWN ? { profile, profile_text: own } : { profile }, load: { times: Number(times), ...(other && { other }) }, quality: {} };
      const started = await post(`${ADMIN}/bench`, { model: subject, kind, force, ...chosen[kind] });
      follow(started.operation, `bench ${subject}`);
      onStarted();
    } catch (error) {
      setRefusal(error);
    }
    setBusy(false);
  };
  const wrong = paramOf(refusal);
  const errorAt = (/** @type {string} */ name) => (wrong === name ? sentence(refusal) : null);
  if (!names.length) return html`<p>No model is known, so there is nothing to measure. <a href=${to("models")}>Add one.</a></p>`;
  return html`<form class="panel" aria-label="Start a bench" onSubmit=${submit}>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${!!refusal && !["model", "profile", "times", "other"].includes(wrong) && html`<p class="error" role="alert">${sentence(refusal)}</p>`}
    <div class="fields">
      <${Field} label="Model" value=${subject} onInput=${setModel} options=${names} error=${errorAt("model")} />
      <${Field} label="Measure" value=${kind} onInput=${setKind} options=${KINDS} />
      ${kind === "speed" && html`<${Field} label="Profile" value=${profile} onInput=${setProfile} options=${[...profiles.map((one) => [one.name, `${one.name} (${plural(one.cells.length, "cell")})`]), [OWN, "one of your own"]]} error=${errorAt("profile")} />`}
      ${kind === "load" && html`<${Field} label="Loads of each way" type="number" min=${1} max=${50} value=${times} onInput=${setTimes} error=${errorAt("times")} />
        <${Field} label="Swap with" value=${other} onInput=${setOther} options=${[["", "the other READY one"], ...names.filter((name) => name !== subject)]} error=${errorAt("other")} />`}
    </div>
    ${kind === "speed" && profile === OWN && html`<${Field} label="Profile in sparkrun's YAML" rows=${8} mono value=${own} onInput=${setOwn} required placeholder="args: {pp: [2048], tg: [128], depth: [0, 4096], concurrency: [1, 4]}" />`}
    ${kind === "load" && html`<p class="hint">Unloads the model and loads it again: cold, which writes its quantized weights anew, then from these, then in place of the other model and back.</p>`}
    ${kind === "quality" && html`<p class="hint">Loads the model as stored and in each format, and compares perplexity, KL divergence and greedy answers. Other models may be evicted meanwhile.</p>`}
    ${kind === "speed" && about && html`<p class="hint">${[plural(about.cells.length, "cell"), about.description].filter(Boolean).join(". ")}</p>`}
    <div class="actions"><button class="main" disabled=${busy || (kind === "speed" && !about && profile !== OWN)}>Start</button><${Check} label=${USED} checked=${force} onChange=${setForce} /></div>
  </form>`;
}

/** @param {{rows: any[], again: () => void}} props */
function Earlier({ rows, again }) {
  /** The ids that are chosen to be compared. */
  const chosen = useMemo(() => signal(/** @type {string[]} */ ([])), []);
  const columns = useMemo(() => columnsFor(chosen, again), [again]);
  // The earlier one is A.
  const pair = rows.filter((row) => chosen.value.includes(row.id)).sort((one, other) => one.started_s - other.started_s);
  return html`<${Table} label="Earlier benches" rows=${rows} columns=${columns} rowKey=${(/** @type {any} */ row) => row.id} search="Search benches" empty="Nothing was measured yet."
    more=${rows.length > 1 && html`<button type="button" disabled=${pair.length !== 2} onClick=${() => go("bench", pair[0].id, pair[1].id)}>Compare</button>
      <span class="quiet-text" role="status">${pair.length === 2 ? "" : `Choose two to compare: ${pair.length} chosen.`}</span>`} />`;
}

/** @param {Signal<string[]>} chosen @param {() => void} again @returns {import("../components/table.js").Column<any>[]} */
function columnsFor(chosen, again) {
  const choose = (/** @type {string} */ id, /** @type {boolean} */ yes) => {
    chosen.value = yes ? [...chosen.value, id] : chosen.value.filter((one) => one !== id);
  };
  return [
    { head: "Bench", name: true, value: (row) => row.id, cell: (row) => html`<a href=${to("bench", row.id)}>${row.id}</a>` },
    { head: "Compare", cell: (row) => html`<input type="checkbox" aria-label="Compare ${row.id}" checked=${chosen.value.includes(row.id)} onChange=${(/** @type {any} */ event) => choose(row.id, event.currentTarget.checked)} />` },
    { head: "Model", value: (row) => row.model, cell: (row) => row.model },
    { head: "Format", value: (row) => row.format, cell: (row) => row.format ?? "as stored" },
    { head: "Profile", value: (row) => row.profile, cell: (row) => row.profile },
    { head: "State", value: (row) => row.state, cell: (row) => html`<${BenchState} state=${row.state} />` },
    { head: "Cells", end: true, value: (row) => row.done, cell: (row) => (row.cells ? `${row.done} of ${row.cells}` : UNKNOWN) },
    { head: "Tokens/s", end: true, hint: "the most of its cells", value: (row) => row.tokens_per_s, cell: (row) => rate(row.tokens_per_s) },
    { head: "Began", end: true, value: (row) => row.started_s, cell: (row) => moment(row.started_s) },
    { head: "", cell: (row) => html`<button type="button" aria-label="Remove ${row.id}" onClick=${async () => (await removed(row.id, row.model)) && again()}>Remove</button>` },
  ];
}
