// The shell of the page: navigation, the connection's badge, the key form, and which page is shown.

import { access, changeKey, keyRefusal, storedKey, useKey } from "./api.js";
import { Question } from "./components/dialog.js";
import { Field } from "./components/form.js";
import { Toasts } from "./components/toast.js";
import { effect, html, render, signal, useEffect, useRef, useState } from "./lib.js";
import { ageS, freshness, liveProblem, liveRefusal, startLive } from "./live.js";
import { Overview } from "./pages/overview.js";
import { route, to } from "./router.js";
import { daemon } from "./store.js";

/** @type {[string, string][]} */
const PAGES = [
  ["overview", "Overview"],
  ["models", "Models"],
  ["requests", "Requests"],
  ["playground", "Playground"],
  ["plan", "Plan"],
  ["bench", "Bench"],
  ["disk", "Disk"],
  ["fabric", "Fabric"],
  ["doctor", "Doctor"],
  ["events", "Events"],
];
/** What comes with the first visit of a page; the overview is there from the start. @type {Record<string, () => Promise<any>>} */
const LOADERS = {
  models: async () => (await import("./pages/models.js")).Models,
  open_models: async () => (await import("./pages/open_models.js")).OpenModels,
  model: async () => (await import("./pages/model.js")).Model,
  requests: async () => (await import("./pages/requests.js")).Requests,
  playground: async () => (await import("./pages/playground.js")).Playground,
  plan: async () => (await import("./pages/plan.js")).Plan,
  bench: async () => (await import("./pages/bench.js")).Bench,
  disk: async () => (await import("./pages/disk.js")).Disk,
  fabric: async () => (await import("./pages/fabric.js")).Fabric,
  doctor: async () => (await import("./pages/doctor.js")).Doctor,
  events: async () => (await import("./pages/events.js")).Events,
};
/** @type {Signal<Record<string, any>>} */
const loaded = signal({ overview: Overview });
const missing = signal(false);
/** The pages that an inference key opens. */
const OPEN = ["models", "playground"];

function Shell() {
  const narrow = access.value === "inference";
  const opened = narrow || access.value === "admin";
  const pages = narrow ? PAGES.filter(([name]) => OPEN.includes(name)) : PAGES;
  const [name = narrow ? "models" : "overview", model] = route.value;
  const [open, setOpen] = useState(false);
  const main = useRef(/** @type {HTMLElement | null} */ (null));
  const title = pages.find(([one]) => one === name)?.[1];
  const address = route.value.join("/");
  useEffect(() => {
    document.title = [model, title, "sparkd"].filter(Boolean).join(" · ");
    setOpen(false);
  }, [address, title]);
  const skip = (/** @type {Event} */ event) => {
    event.preventDefault();
    main.current?.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/">sparkd</a>
      ${opened && html`
        <${Badge} />
        <button type="button" class="menu" aria-expanded=${open ? "true" : "false"} aria-controls="navigation" onClick=${() => setOpen(!open)}>Menu</button>
        <nav id="navigation" aria-label="Pages" class=${open ? "open" : ""}>
          ${pages.map(([one, text]) => html`<a key=${one} href=${to(one)} aria-current=${one === name ? "page" : null}>${text}</a>`)}
          ${storedKey() && html`<button type="button" class="quiet change-key" onClick=${changeKey}>Change key</button>`}
        </nav>
        <${Version} />`}
    </header>
    <main ref=${main} id="main" tabindex="-1">
      <${Outdated} />
      <${Content} name=${name} narrow=${narrow} pages=${pages} />
    </main>
    <${Toasts} /><${Question} />
  `;
}

/** @param {{name: string, narrow: boolean, pages: [string, string][]}} props */
function Content({ name, narrow, pages }) {
  if (access.value === "none") return html`<${KeyForm} />`;
  if (liveRefusal.value) return html`<section class="page"><h1>sparkd refuses this page</h1><p class="error" role="alert">${liveRefusal.value}</p>${storedKey() && html`<div class="actions"><button type="button" onClick=${changeKey}>Change key</button></div>`}</section>`;
  if (!narrow && !daemon.value) return html`<section class="page"><h1>sparkd</h1><p class="quiet-text" role="status">${liveProblem.value || "Waiting for sparkd's first answer."}</p></section>`;
  if (!pages.some(([one]) => one === name)) return html`<section class="page"><h1>No such page</h1><p><a href="#/">Start</a></p></section>`;
  const [, model] = route.value;
  if (name !== "models") return html`<${Loaded} key=${name} name=${name} />`;
  if (narrow) return html`<${Loaded} key="open" name="open_models" />`;
  return model ? html`<${Loaded} key=${`model ${model}`} name="model" of=${model} />` : html`<${Loaded} key="models" name="models" />`;
}

/** A page whose modules may still have to come. @param {{name: string, of?: string}} props */
function Loaded({ name, of }) {
  const page = loaded.value[name];
  useEffect(() => {
    if (page) return;
    LOADERS[name]?.().then(
      (one) => (loaded.value = { ...loaded.peek(), [name]: one }),
      () => (missing.value = true),
    );
  }, [name]);
  if (page) return html`<${page} name=${of} />`;
  return html`<section class="page"><p class="quiet-text" role="status">Loading the page…</p></section>`;
}

/** Another release has other files, and those of this page are gone with the old one. */
function Outdated() {
  const version = daemon.value?.version;
  const first = useRef(version);
  first.current ??= version;
  if (!missing.value && version === first.current) return null;
  return html`<p class="outdated" role="alert">${missing.value ? "A part of this page could not be loaded." : "sparkd was updated."} <button type="button" onClick=${() => location.reload()}>Reload the page</button></p>`;
}

function Badge() {
  if (access.value === "inference") return html`<span class="badge" role="status"><span class="word idle">inference key</span></span>`;
  const now = freshness.value;
  const words = { live: "live", connecting: "connecting", old: "not live" };
  const tones = { live: "good", connecting: "busy", old: "bad" };
  return html`<span class="badge">
    <span class="word ${tones[now]}" role="status">${words[now]}</span>
    <span class="quiet-text figure age">${now === "old" ? `figures are ${ageS.value}s old` : ""}</span>
    ${now === "old" && liveProblem.value && html`<span class="age">${liveProblem.value}</span>`}
  </span>`;
}

function Version() {
  const about = daemon.value;
  if (!about) return null;
  const state = about.draining ? "draining" : about.settled ? "" : "starting";
  return html`<p class="version quiet-text">sparkd ${about.version}${state && ` · ${state}`}</p>`;
}

function KeyForm() {
  const [key, setKey] = useState("");
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    useKey(key.trim());
    startLive();
  };
  return html`<section class="page narrow">
    <h1>Key</h1>
    <p>This sparkd asks for an API key. The browser keeps it until this tab is closed.</p>
    <form onSubmit=${submit}>
      <${Field} label="API key" type="password" value=${key} onInput=${setKey} error=${keyRefusal.value} required
        hint="With an admin key every page opens, with an inference key Playground and Models." />
      <div class="actions"><button class="main">Open</button></div>
    </form>
  </section>`;
}

// Figures turn grey where they are old: see style.css.
effect(() => {
  document.documentElement.classList.toggle("old-figures", freshness.value === "old");
});

const place = document.getElementById("page");
if (place) {
  place.replaceChildren();
  render(html`<${Shell} />`, place);
}
startLive();
