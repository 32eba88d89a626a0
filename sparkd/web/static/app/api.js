// The requests to the daemon: the key, the body of a refusal, and what a refused key leaves open.

import { signal } from "./lib.js";

export const ADMIN = "/admin/v1";
const KEY = "sparkd-key";

/**
 * What the key opens. `unknown` before the first answer; `none`: a key is asked for; `inference`: Playground and Models only.
 * @type {Signal<"unknown" | "none" | "inference" | "admin">}
 */
export const access = signal("unknown");
/** The daemon's sentence for why it asks for a key, or for another one. @type {Signal<string>} */
export const keyRefusal = signal("");

/** A refusal of the daemon, with its own sentence; status 0 where it does not answer. */
export class Refused extends Error {
  /** @param {string} message @param {number} status @param {string | null} [code] @param {string | null} [param] */
  constructor(message, status, code = null, param = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY);
}

/** @param {string} key */
export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  keyRefusal.value = "";
  access.value = "unknown";
}

/** Forget the key, and all that it showed. */
export function changeKey() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

/** @returns {Record<string, string>} */
function credentials() {
  const key = storedKey();
  return { "x-sparkd-client": "page", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/**
 * A response whose status is not an error. Raises Refused for every other one.
 * @param {string} method
 * @param {string} path
 * @param {{body?: unknown, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 */
export async function request(method, path, { body, headers = {}, signal: abort } = {}) {
  const content = body === undefined ? {} : { body: JSON.stringify(body) };
  /** @type {Record<string, string>} */
  const kind = body === undefined ? {} : { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, headers: { ...credentials(), ...kind, ...headers }, signal: abort ?? null, cache: "no-store", ...content });
  } catch (error) {
    if (abort?.aborted) throw error;
    throw new Refused("sparkd does not answer.", 0);
  }
  if (response.ok) return response;
  const refusal = await refusalOf(response);
  if (response.status === 401) {
    keyRefusal.value = storedKey() ? refusal.message : "";
    access.value = "none";
  }
  throw refusal;
}

/** @param {Response} response */
async function refusalOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const error = JSON.parse(text).error;
    return new Refused(String(error.message), response.status, error.code ?? null, error.param ?? null);
  } catch {
    return new Refused(`sparkd answered ${response.status}${response.statusText ? ` ${response.statusText}` : ""}.`, response.status);
  }
}

/** @param {string} path @param {{signal?: AbortSignal}} [options] @returns {Promise<any>} */
export const get = async (path, options) => (await request("GET", path, options)).json();
/** @param {string} path @param {unknown} [body] @returns {Promise<any>} */
export const post = async (path, body) => (await request("POST", path, { body })).json();
/** @param {string} path @param {unknown} body @returns {Promise<any>} */
export const put = async (path, body) => (await request("PUT", path, { body })).json();
/** @param {string} path @returns {Promise<any>} */
export const remove = async (path) => (await request("DELETE", path)).json();

/** The path of a model, whose name may have slashes. @param {string} name @param {string} [rest] */
export const modelPath = (name, rest = "") => `${ADMIN}/models/${name.split("/").map(encodeURIComponent).join("/")}${rest}`;

/** Find out what an inference key opens, after the admin API refused it with 403. Raises the refusal without a key, and Refused. @param {unknown} refusal */
export async function narrowAccess(refusal) {
  if (!storedKey()) throw refusal;
  await request("GET", "/v1/models");
  access.value = "inference";
}

/** The key that a refusal is about: the first part of its parameter, such as `env` of `env.HF_TOKEN`. @param {unknown} refusal */
export const paramOf = (refusal) => (refusal instanceof Refused ? refusal.param?.split(".")[0] ?? "" : "");
