// The knowledge of which elements are on the screen, so that only those are drawn again.

import { signal, useEffect, useMemo } from "./lib.js";

/** @type {WeakMap<Element, Signal<boolean>>} */
const watched = new WeakMap();
const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const visible = watched.get(entry.target);
      if (visible) visible.value = entry.isIntersecting;
    }
  },
  { rootMargin: "200px" },
);

/** Whether the element of a reference is on the screen, or near it; true before that is known. @param {{current: Element | null}} ref */
export function useVisible(ref) {
  const visible = useMemo(() => signal(true), []);
  useEffect(() => {
    const element = ref.current;
    if (!element) return undefined;
    watched.set(element, visible);
    observer.observe(element);
    return () => observer.unobserve(element);
  }, []);
  return visible;
}
