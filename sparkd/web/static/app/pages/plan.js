import { html } from "../lib.js";
export const Plan = () => html`<section class="page"><h1>Plan</h1></section>`;
