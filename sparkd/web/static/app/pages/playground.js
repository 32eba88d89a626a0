import { html } from "../lib.js";
export const Playground = () => html`<section class="page"><h1>Playground</h1></section>`;
