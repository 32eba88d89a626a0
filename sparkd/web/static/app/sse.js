// Reads server-sent events from a fetch, which can carry a key where EventSource cannot.

/**
 * Each event of a response, with the lines of its data joined. A comment comes as the event `comment`.
 * @param {Response} response
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* eventsOf(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let event = "message";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      const lines = pending.split(/\r\n|\n|\r(?!$)/);
      pending = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
          continue;
        }
        const colon = line.indexOf(":");
        if (colon === 0) {
          yield { event: "comment", data: line.slice(1).trim() };
          continue;
        }
        const field = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "data") data.push(text);
        else if (field === "event") event = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
