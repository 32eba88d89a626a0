// The types of the documents that the page reads: those of the admin API's OpenAPI document.

import type { Signal as PreactSignal } from "@preact/signals";
import type { components } from "./admin";

type Schemas = components["schemas"];

declare global {
  type Signal<T> = PreactSignal<T>;
  type Condition = Schemas["Condition"];
  /** command: what cures it, to be copied. */
  type Finding = Schemas["Finding"];
  type Operation = Schemas["Operation"];
  type Progress = Omit<Schemas["Progress"], "kv"> & { kv?: any };
  type LiveNode = Schemas["LiveNode"];
  type LiveModel = Omit<Schemas["LiveModel"], "progress"> & { progress?: Progress | null };
  type Cable = Schemas["LiveCable"];
}
