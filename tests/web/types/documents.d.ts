// Owns the types of the documents that the page reads: those of the admin API's OpenAPI document, and of the live document after its patches.

import type { Signal as PreactSignal } from "@preact/signals";
import type { components } from "./admin";

type Schemas = components["schemas"];

/** After a merge patch a member that is unknown is not there: what may be null may be missing. */
type Known<T> = T extends (infer One)[]
  ? Known<One>[]
  : T extends object
    ? { [Name in keyof T as null extends T[Name] ? never : Name]: Known<T[Name]> } & { [Name in keyof T as null extends T[Name] ? Name : never]?: Known<T[Name]> }
    : T;

declare global {
  type Signal<T> = PreactSignal<T>;
  type Condition = Known<Schemas["Condition"]>;
  /** command: what cures it, to be copied. */
  type Finding = Schemas["Finding"];
  type Operation = Known<Schemas["Operation"]>;
  type Progress = Partial<Omit<Known<Schemas["Progress"]>, "kv">> & { kv?: any };
  type LiveNode = Known<Schemas["LiveNode"]>;
  type LiveModel = Omit<Known<Schemas["LiveModel"]>, "progress"> & { progress?: Progress | null };
  type Cable = Known<Schemas["LiveCable"]>;
}
