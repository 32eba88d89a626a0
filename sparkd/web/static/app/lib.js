// The one place where the page's libraries are imported.

import htm from "../vendor/htm.js";
import { createElement, Fragment, render } from "../vendor/preact.js";

export { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";
export { Fragment, render };

/** Markup as a template: html`<b>${text}</b>`. Text is always escaped; nothing here takes raw HTML. */
export const html = htm.bind(createElement);
