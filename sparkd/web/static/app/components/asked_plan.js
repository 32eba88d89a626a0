// A plan as the daemon gives it: the guess at once, and the numbers of vLLM once its operation has ended.

import { ADMIN, get, post } from "../api.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { operations } from "../store.js";

// How long one question about the operation waits for its end.
const WAIT_S = 60;

/**
 * ask: plan a question; show gets each plan, the better one later. It resolves with the first one, and raises the refusal of the question.
 * @returns {{ask: (question: Record<string, unknown>, show: (plan: any) => void) => Promise<void>, progress: {operation: string | null, unheard: string}}}
 */
export function usePlan() {
  const [progress, setProgress] = useState({ operation: /** @type {string | null} */ (null), unheard: "" });
  // The newest question: an answer to an earlier one is not shown.
  const newest = useRef(0);
  useEffect(() => () => void newest.current++, []);
  const ask = async (/** @type {Record<string, unknown>} */ question, /** @type {(plan: any) => void} */ show) => {
    const own = ++newest.current;
    setProgress({ operation: null, unheard: "" });
    const take = async () => {
      const plan = await post(`${ADMIN}/plan`, question);
      if (newest.current !== own) return null;
      show(plan);
      setProgress({ operation: plan.operation, unheard: "" });
      return plan.operation;
    };
    const follow = async (/** @type {string | null} */ operation) => {
      while (operation && newest.current === own) {
        const ended = await get(`${ADMIN}/operations/${operation}?wait_s=${WAIT_S}`);
        if (ended.state === "SUCCEEDED") operation = await take();
        else if (ended.state !== "RUNNING") throw new Error(ended.message);
      }
    };
    const operation = await take();
    follow(operation).catch((error) => newest.current === own && setProgress({ operation: null, unheard: error.message }));
  };
  return { ask, progress };
}

/** @param {{progress: {operation: string | null, unheard: string}}} props */
export function PlanProgress({ progress: { operation, unheard } }) {
  if (unheard) return html`<p class="quiet-text" role="status">The numbers are a guess: ${unheard}</p>`;
  if (!operation) return null;
  const step = operations.of(operation).value?.message || "it starts";
  return html`<p class="quiet-text" role="status">A guess so far. sparkd asks vLLM about the model, which takes 10 to 40 s the first time: ${step}…</p>`;
}
