// Saves a plot as it is shown: the colours of the scheme, on the card's ground, without a style sheet.
"use strict";

const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order", "font-family",
  "font-size", "font-weight"];
// Pixels of a PNG for each of the view box: enough for a slide.
const PNG_SCALE = 3;

function standalone(svg) {
  const copy = svg.cloneNode(true);
  const shown = [...svg.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((part, index) => {
    const style = getComputedStyle(shown[index]);
    if (!["title", "desc"].includes(part.tagName)) {
      for (const name of KEPT) part.setAttribute(name, style.getPropertyValue(name));
    }
    part.removeAttribute("class");
  });
  copy.removeAttribute("class");
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  ground.setAttribute("width", "100%");
  ground.setAttribute("height", "100%");
  ground.setAttribute("fill", getComputedStyle(svg.closest("figure")).backgroundColor);
  copy.insertBefore(ground, copy.querySelector("desc").nextSibling);
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}

function offer(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function png(blob, svg) {
  const address = URL.createObjectURL(blob);
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = svg.viewBox.baseVal.width * PNG_SCALE;
    canvas.height = svg.viewBox.baseVal.height * PNG_SCALE;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

document.addEventListener("click", async (event) => {
  const kind = event.target.dataset?.save;
  if (!kind) return;
  const figure = event.target.closest("figure");
  const svg = [...figure.querySelectorAll("svg")].find((each) => getComputedStyle(each).display !== "none");
  const blob = standalone(svg);
  const name = figure.dataset.name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  offer(kind === "png" ? await png(blob, svg) : blob, `${name}.${kind}`);
});
