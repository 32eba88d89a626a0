// The page of a plan: the questions of `sparkd plan` as a form, its answer at once, and again once vLLM has spoken.

import { paramOf } from "../api.js";
import { PlanProgress, usePlan } from "../components/asked_plan.js";
import { Choice, Fit } from "../components/fit.js";
import { Field } from "../components/form.js";
import { sentence } from "../components/toast.js";
import { html, useState } from "../lib.js";
import { models } from "../store.js";
import { tokens, typed } from "../yaml.js";

/** The fields of the question, with the options of the command line. @type {[string, string, {hint?: string, kind: "text" | "whole" | "number", options?: [string, string][]}][]} */
const FIELDS = [
  ["nodes", "Nodes", { kind: "whole" }],
  ["max_model_len", "Context, tokens", { kind: "whole", hint: "32k is 32,000, 32K is 32,768; empty for as many as fit" }],
  ["requests", "Requests at once", { kind: "whole" }],
  ["quantize", "Format", { kind: "text", hint: "such as nvfp4; empty tries all" }],
  ["kv_cache_dtype", "KV cache dtype", { kind: "text", options: [["", "as configured"], ["auto", "auto"], ["fp8", "fp8"], ["fp8_e4m3", "fp8_e4m3"], ["fp8_e5m2", "fp8_e5m2"]] }],
  ["speculative", "Speculative decoding", { kind: "text", hint: "such as mtp; empty for none" }],
  ["max_num_batched_tokens", "Batched tokens", { kind: "whole" }],
  ["max_num_seqs", "Sequences at once", { kind: "whole" }],
  ["margin_gib", "Margin, GiB", { kind: "number" }],
];

/** The machines of `--hardware`, and what each asks for. @type {[string, string, Record<string, unknown>][]} */
const HARDWARE = [
  ["node", "this node", {}],
  ["spark", "a Spark", { hardware: "spark" }],
  ["sparks", "two Sparks", { hardware: "spark", nodes: 2 }],
  ["h200", "an H200", { hardware: "h200" }],
];
const NAMES = ["model", "hardware", ...FIELDS.map(([name]) => name)];

export function Plan() {
  const [model, setModel] = useState("");
  const [values, setValues] = useState(/** @type {Record<string, string>} */ ({}));
  const [hardware, setHardware] = useState("node");
  const [answer, setAnswer] = useState(/** @type {any} */ (null));
  const [refusal, setRefusal] = useState(/** @type {unknown} */ (null));
  const [busy, setBusy] = useState(false);
  const { ask, progress } = usePlan();
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setRefusal(null);
    /** @type {Record<string, unknown>} */
    const question = { model: model.trim(), ...HARDWARE.find(([name]) => name === hardware)?.[2] };
    for (const [name, , { kind }] of FIELDS) {
      const text = (values[name] ?? "").trim();
      if (text) question[name] = kind === "text" ? (text.startsWith("{") ? typed(text) : text) : tokens(text);
    }
    try {
      await ask(question, setAnswer);
    } catch (error) {
      setRefusal(error);
      setAnswer(null);
    }
    setBusy(false);
  };
  const wrong = paramOf(refusal);
  const errorAt = (/** @type {string} */ name) => (wrong === name ? sentence(refusal) : null);
  return html`<section class="page">
    <h1>Plan</h1>
    <p class="quiet-text">Whether a model fits, from its headers and vLLM's answer. No weights are read.</p>
    <form class="panel" onSubmit=${submit}>
      ${!!refusal && !NAMES.includes(wrong) && html`<p class="error" role="alert">${sentence(refusal)}</p>`}
      <${Field} label="Model" value=${model} onInput=${setModel} required mono list=${models.keys.value} error=${errorAt("model")} hint="A known model, a recipe, a folder or a hub id." />
      <div class="fields">
        <${Field} label="Hardware" value=${hardware} onInput=${setHardware} options=${HARDWARE.map(([name, text]) => [name, text])} error=${errorAt("hardware")} />
        ${FIELDS.map(([name, label, { hint, options }]) => html`<${Field} key=${name} label=${label} value=${values[name] ?? ""} hint=${hint} options=${options} error=${errorAt(name)}
          onInput=${(/** @type {string} */ text) => setValues({ ...values, [name]: text })} />`)}
      </div>
      <div class="actions"><button class="main" disabled=${busy}>Plan</button><span role="status">${busy ? "Reading the headers…" : ""}</span></div>
    </form>
    <${PlanProgress} progress=${progress} />
    ${answer && html`<section aria-label="Answer"><${Fit} answer=${answer} /><${Choice} answer=${answer} /></section>`}
  </section>`;
}
