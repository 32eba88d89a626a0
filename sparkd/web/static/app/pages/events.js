import { html } from "../lib.js";
export const Events = () => html`<section class="page"><h1>Events</h1></section>`;
