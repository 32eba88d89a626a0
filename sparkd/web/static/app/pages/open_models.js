import { html } from "../lib.js";
export const OpenModels = () => html`<section class="page"><h1>OpenModels</h1></section>`;
