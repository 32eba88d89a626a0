// Answers that are asked for once: while they come, when they are refused, and again on request.

import { get } from "../api.js";
import { html, useEffect, useState } from "../lib.js";
import { sentence } from "./toast.js";

/**
 * The answer of a path, null before it. again: ask once more.
 * @param {string} path @param {unknown} [version] a new value asks again
 * @returns {{answer: any, problem: string, busy: boolean, again: () => void}}
 */
export function useAnswer(path, version) {
  const [state, setState] = useState({ path, answer: /** @type {any} */ (null), problem: "", busy: true });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    setState((before) => ({ path, answer: before.path === path ? before.answer : null, problem: "", busy: true }));
    get(path, { signal: abort.signal }).then(
      (answer) => setState({ path, answer, problem: "", busy: false }),
      (error) => abort.signal.aborted || setState((before) => ({ ...before, problem: sentence(error), busy: false })),
    );
    return () => abort.abort();
  }, [path, version, turn]);
  return { ...state, again: () => setTurn(turn + 1) };
}

/** @param {{problem: string, busy: boolean, empty: boolean}} props empty: there is no answer to show yet */
export const Waiting = ({ problem, busy, empty }) => html`
  ${problem && html`<p class="error" role="alert">${problem}</p>`}
  ${!problem && busy && empty && html`<p class="quiet-text" role="status">Asking sparkd…</p>`}
`;
