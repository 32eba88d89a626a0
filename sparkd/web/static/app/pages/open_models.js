// The list of models that an inference key sees.

import { get } from "../api.js";
import { State } from "../components/state.js";
import { Table } from "../components/table.js";
import { sentence } from "../components/toast.js";
import { html, useEffect, useState } from "../lib.js";
import { count, UNKNOWN } from "../units.js";

const EVERY_S = 5;

/** @param {any} model */
export const stateOf = (model) => String(model.status?.state ?? "unknown");

/** Models of `/v1/models`, asked for again and again while the page is open. @param {boolean} [wanted] */
export function useOpenModels(wanted = true) {
  const [some, setSome] = useState(/** @type {any[]} */ ([]));
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!wanted) return undefined;
    let timer = 0;
    let ended = false;
    const look = async () => {
      try {
        setSome((await get("/v1/models")).data);
        setProblem("");
      } catch (error) {
        setProblem(sentence(error));
      }
      if (!ended) timer = setTimeout(look, EVERY_S * 1000);
    };
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [wanted]);
  return { some, problem };
}

/** @type {import("../components/table.js").Column<any>[]} */
const COLUMNS = [
  { head: "Model", name: true, value: (model) => model.id, cell: (model) => model.id },
  { head: "State", value: stateOf, cell: (model) => html`<${State} model=${{ state: stateOf(model) }} />` },
  { head: "Context", end: true, value: (model) => model.max_model_len, cell: (model) => count(model.max_model_len) },
  { head: "Source", value: (model) => model.root, cell: (model) => model.root ?? UNKNOWN },
];

export function OpenModels() {
  const { some, problem } = useOpenModels();
  return html`<section class="page">
    <h1>Models</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <${Table} label="Models" rows=${some} columns=${COLUMNS} rowKey=${(/** @type {any} */ model) => model.id} search="Search models" empty="No model is known." />
  </section>`;
}
