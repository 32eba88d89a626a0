import { html } from "../lib.js";
export const Models = () => html`<section class="page"><h1>Models</h1></section>`;
