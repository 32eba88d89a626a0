// The dialog that adds a model: a plan first, then the entry, then the request.

import { ADMIN, get, post, Refused } from "../api.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { go } from "../router.js";
import { entryText } from "../yaml.js";
import { PlanProgress, usePlan } from "./asked_plan.js";
import { Copy } from "./copy.js";
import { Dialog } from "./dialog.js";
import { EntryKeys, keyOf, rowsOf, specOf } from "./entry_keys.js";
import { Fit } from "./fit.js";
import { Check, Field } from "./form.js";
import { act, sentence } from "./toast.js";

/** @param {{onClose: () => void}} props */
export function AddModel({ onClose }) {
  const [source, setSource] = useState("");
  const [name, setName] = useState("");
  // The name that the last check gave: another check replaces it, but not what was typed.
  const [given, setGiven] = useState("");
  const [keys, setKeys] = useState(/** @type {string[]} */ ([]));
  const [rows, setRows] = useState(/** @type {import("./entry_keys.js").Row[] | null} */ (null));
  const [load, setLoad] = useState(true);
  const [answer, setAnswer] = useState(/** @type {any} */ (null));
  const [recipes, setRecipes] = useState(/** @type {any[]} */ ([]));
  const [busy, setBusy] = useState("");
  const [planRefusal, setPlanRefusal] = useState(/** @type {unknown} */ (null));
  const [refusal, setRefusal] = useState(/** @type {unknown} */ (null));
  const { ask, progress } = usePlan();
  // The rows of the last plan: a better one replaces them, but not what was typed.
  const planned = useRef("");
  useEffect(() => {
    get(`${ADMIN}/recipes`).then((listed) => setRecipes(listed.recipes), () => {});
  }, []);

  const check = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const asked = source.trim();
    setBusy("plan");
    setPlanRefusal(null);
    setRefusal(null);
    setAnswer(null);
    try {
      // The daemon decides what the words mean, here and for the plan.
      const meant = await get(`${ADMIN}/entry?${new URLSearchParams({ source: asked })}`);
      if (!name || name === given) {
        setName(meant.name);
        setGiven(meant.name);
      }
      setKeys(meant.keys);
      // A model whose headers cannot be read may be added all the same.
      const { model, recipe } = specOf(rows ?? []);
      if (model !== meant.spec.model || recipe !== meant.spec.recipe) setRows(rowsOf(meant.spec));
      planned.current = "";
      await ask({ model: asked }, (plan) => {
        const next = rowsOf((meant.spec.model && !plan.choice?.configured && plan.choice?.config) || meant.spec);
        setAnswer(plan);
        setRows((shown) => (planned.current && JSON.stringify(shown) !== planned.current ? shown : next));
        planned.current ||= JSON.stringify(next);
      });
    } catch (error) {
      setPlanRefusal(error);
    }
    setBusy("");
  };
  const add = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy("add");
    setRefusal(null);
    try {
      const taken = await post(`${ADMIN}/models`, { name, spec: specOf(rows ?? []), load });
      await act(async () => taken, load ? undefined : `${name} was added.`);
      onClose();
      go("models", name);
    } catch (error) {
      setRefusal(error);
    }
    setBusy("");
  };
  const atName = refusal instanceof Refused && (refusal.param === "name" || (refusal.code === "conflict" && !refusal.param));
  const atKey = rows ? keyOf(refusal, rows) : "";
  return html`<${Dialog} title="Add model" onClose=${onClose} wide>
    <form onSubmit=${check}>
      <${Field} label="Hub id, folder or recipe" value=${source} onInput=${setSource} required mono list=${recipes.map((one) => one.name)} error=${planRefusal ? sentence(planRefusal) : null} placeholder="Qwen/Qwen3-30B-A3B" />
      <div class="actions"><button class="main" disabled=${busy !== ""}>Check whether it fits</button><span role="status">${busy === "plan" ? "Reading the headers…" : ""}</span></div>
    </form>
    <${PlanProgress} progress=${progress} />
    ${answer && html`<${Fit} answer=${answer} />`}
    ${rows && html`<form onSubmit=${add}>
      ${!!refusal && !atName && !atKey && html`<p class="error" role="alert">${sentence(refusal)}</p>`}
      <${Field} label="Name" value=${name} onInput=${setName} required mono error=${atName ? sentence(refusal) : null} />
      <${EntryKeys} keys=${keys} rows=${rows} onChange=${setRows} refusal=${refusal} />
      <div class="page-head"><h3>The entry</h3><${Copy} text=${() => entryText(name, specOf(rows))} label="Copy entry" /></div>
      <pre>${entryText(name, specOf(rows))}</pre>
      <div class="actions">
        <${Check} label="Load it now" checked=${load} onChange=${setLoad} />
        <button class="main" disabled=${busy !== ""}>Add</button><span role="status">${busy === "add" ? "Adding…" : ""}</span>
      </div>
    </form>`}
  <//>`;
}

