/** Its own types give every template's values a name; here a template takes what it is given. */
declare const htm: { bind(create: unknown): (strings: TemplateStringsArray, ...values: any[]) => any };
export default htm;
