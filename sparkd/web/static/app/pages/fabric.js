import { html } from "../lib.js";
export const Fabric = () => html`<section class="page"><h1>Fabric</h1></section>`;
