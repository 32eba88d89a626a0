// An entry of sparkd.yaml as text, and the values that a person types for its keys.

/** A value as YAML on one line: JSON for lists and mappings, quotes where plain text would be read as something else. @param {unknown} value */
export function scalar(value) {
  if (value === null || typeof value !== "string") return JSON.stringify(value);
  const plain = /^[A-Za-z0-9_./@+-][A-Za-z0-9_./@+: -]*$/.test(value) && !/: |:$| $/.test(value);
  return plain && typed(value) === value && !/^(yes|no|on|off|true|false|null|~|-.*)$/i.test(value) ? value : JSON.stringify(value);
}

/** @param {string} name @param {Record<string, unknown>} spec */
export const entryText = (name, spec) => ["models:", `  ${scalar(name)}:`, ...Object.entries(spec).map(([key, value]) => `    ${key}: ${scalar(value)}`)].join("\n");

/** What a person typed: JSON where it is JSON, else text. @param {string} text @returns {unknown} */
export function typed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {unknown} value */
export const shown = (value) => (typeof value === "string" && typed(value) === value ? value : JSON.stringify(value));

/** A number that may end in a letter, as the configuration has it: 32k is 32,000, 32K is 32,768. Anything else is as it was typed. @param {string} text @returns {unknown} */
export function tokens(text) {
  const found = /^([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])$/.exec(text);
  if (!found) return typed(text);
  const letter = found[2] ?? "";
  return Math.floor(Number(found[1]) * (letter === letter.toLowerCase() ? 1000 : 1024) ** ("kmgt".indexOf(letter.toLowerCase()) + 1));
}
