import { html } from "../lib.js";
export const Disk = () => html`<section class="page"><h1>Disk</h1></section>`;
