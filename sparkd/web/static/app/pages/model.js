import { html } from "../lib.js";
export const Model = () => html`<section class="page"><h1>Model</h1></section>`;
