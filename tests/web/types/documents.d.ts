// Owns the types of the documents that the page reads: those of the admin API's OpenAPI document, and the live document's additions.

import type { Signal as PreactSignal } from "@preact/signals";
import type { components } from "./admin";

type Schemas = components["schemas"];

declare global {
  type Signal<T> = PreactSignal<T>;
  type Condition = Schemas["Condition"];
  type Finding = Schemas["Finding"];
  type Operation = Schemas["Operation"];
  type Progress = Partial<Omit<Schemas["Progress"], "kv">> & { kv?: any };

  type LiveNode = Schemas["Node"] & {
    host?: string | null;
    limits?: { soft: number; hard: number; floor: number } | null;
    engines?: { model: string; host_bytes: number | null; device_bytes: number | null }[] | null;
    reserved_bytes?: number | null;
    released_bytes?: number | null;
    uptime_s?: number | null;
    disk?: { total_bytes: number; free_bytes: number } | null;
    gpu?: {
      name: string | null;
      power_w: number | null;
      busy_percent: number | null;
      celsius: number | null;
      clock_mhz: number | null;
      throttled: string[] | null;
    } | null;
  };

  type LiveModel = Omit<Schemas["Model"], "progress"> & {
    progress: Progress | null;
    pin?: boolean;
    rates?: {
      prompt_tokens_per_s: number | null;
      generation_tokens_per_s: number | null;
      running: number | null;
      waiting: number | null;
      kv_usage: number | null;
      prefix_hit_ratio: number | null;
      ttft_p50_s: number | null;
      ttft_p95_s: number | null;
      itl_p50_s: number | null;
      itl_p95_s: number | null;
      e2e_p50_s: number | null;
      e2e_p95_s: number | null;
      acceptance: (number | null)[] | null;
      joules_per_token: number | null;
    } | null;
  };

  type Cable = Schemas["Cable"] & { rate_gb_s: number | null; verdict: string | null; problem: string | null };
}
