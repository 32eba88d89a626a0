import { html } from "../lib.js";
export const Doctor = () => html`<section class="page"><h1>Doctor</h1></section>`;
