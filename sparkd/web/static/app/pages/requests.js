import { html } from "../lib.js";
export const Requests = () => html`<section class="page"><h1>Requests</h1></section>`;
