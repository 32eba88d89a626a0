// What can be done with a bench from several pages: ask for it, remove it, go on with it.

import { ADMIN, post, remove } from "../api.js";
import { useEffect, useState } from "../lib.js";
import { go } from "../router.js";
import { operations } from "../store.js";
import { confirmed } from "./dialog.js";
import { useAnswer } from "./loaded.js";
import { act } from "./toast.js";

const EVERY_S = 2;
/** The label of `force`. */
export const USED = "Measure although others use a model";

/** @param {string} id */
const benchPath = (id) => `${ADMIN}/bench/${encodeURIComponent(id)}`;

/** The operation of the bench that runs. */
export const runningBench = () => operations.all().find((operation) => operation.kind === "bench" && operation.state === "RUNNING");

/** A number that grows again and again, while it is wanted and the page can be seen. @param {boolean} wanted */
function useTurns(wanted) {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!wanted) return undefined;
    const timer = setInterval(() => document.hidden || setTurn((before) => before + 1), EVERY_S * 1000);
    return () => clearInterval(timer);
  }, [wanted]);
  return turn;
}

/** A bench's result, asked again and again while it runs. @param {string} id */
export function useBench(id) {
  const [running, setRunning] = useState(false);
  const asked = useAnswer(benchPath(id), useTurns(running));
  useEffect(() => setRunning(asked.answer?.state === "running"), [asked.answer]);
  return asked;
}

/** All benches in short; again and again where one runs of which no operation tells, because its end is about to be written. @param {string | undefined} operation */
export function useBenches(operation) {
  const [ending, setEnding] = useState(false);
  const asked = useAnswer(`${ADMIN}/bench`, `${operation} ${useTurns(ending)}`);
  const unsaid = !operation && !!asked.answer?.benches.some((/** @type {any} */ row) => row.state === "running");
  useEffect(() => setEnding(unsaid), [unsaid]);
  return asked;
}

/** Ask, then remove a result. Whether it is gone. @param {string} id @param {string} model */
export async function removed(id, model) {
  const yes = await confirmed(`Remove ${id}?`, `The figures of this bench of ${model} are deleted.`, "Remove");
  return yes && !!(await act(() => remove(benchPath(id)), `${id} was removed.`));
}

/** The names of the texts that come with sparkd (sparkd/bench/passages.py, benchy.py). */
const SHIPPED_TEXTS = ["sparkd's text (", "words of a fixed seed ("];

/** The command that goes on with a bench whose profile or text is a file of the user's; null where the page can go on with it. @param {any} result @param {string[]} profiles that come with sparkd */
export function fileCommand(result, profiles) {
  const own = result.text !== null && !SHIPPED_TEXTS.some((name) => result.text.startsWith(name));
  const known = profiles.includes(result.profile);
  if (!own && (known || result.kind === "quality")) return null;
  const how = result.kind === "quality" ? "--quality --text FILE" : `--profile ${known ? result.profile : "FILE"}${own ? " --book FILE" : ""}`;
  return `sparkd bench ${result.subject.model} ${how} --resume ${result.id}`;
}

/** Go on with the cells that are not measured yet, as the bench began, with a text of sparkd's. @param {any} result @param {boolean} force */
export async function resumed(result, force) {
  const how = result.kind === "speed" ? { profile: result.profile } : {};
  const begun = await act(() => post(`${ADMIN}/bench`, { model: result.subject.model, kind: result.kind, ...how, resume: result.id, force }));
  if (begun) go("bench");
}
