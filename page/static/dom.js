// Elements, texts and requests of every view. Texts of spans become text nodes here and nowhere else.

// Controls that change the order or the place of other characters, or have no shape at all, are shown by their numbers.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/u;
const EVERY_HIDDEN = new RegExp(HIDDEN.source, "gu");

export function visible(text) {
  const value = String(text);
  return HIDDEN.test(value)
    ? value.replace(EVERY_HIDDEN, (control) => `⟨U+${control.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`)
    : value;
}

// h("a", {href, class: "x", onclick}, "text", node, ...): strings and numbers become text nodes.
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  if (properties?.href !== undefined) element.setAttribute("href", safeAddress(properties.href));
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return element;
}

// The same for elements of a picture.
export function svg(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value !== null && value !== undefined) element.setAttribute(name, name === "href" ? safeAddress(value) : visible(value));
  }
  element.append(...children.flat(Infinity).filter(Boolean).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(visible(child));
}

function safeAddress(address) {
  return /^(https?:\/\/|\/|\?|#)/.test(address) ? address : "#";
}

export function put(id, ...children) {
  const element = document.getElementById(id);
  element.replaceChildren(...children.flat(Infinity).filter(Boolean).map(asNode));
  return element;
}

// The address of a view with parameters; empty ones are left out.
export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== "" && value !== null && value !== undefined) query.append(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

// The answer to a request in JSON. Its error is shown, and thrown.
export async function ask(path, { signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, { headers: { Accept: "application/json" }, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return problem("The page's server does not answer. Start it with `spangrad page`.");
  }
  if (answer.status === 401) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  const text = await answer.text();
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    return problem(text.slice(0, 300));
  }
  if (!answer.ok) return problem(value.error);
  return value;
}

export function problem(sentence) {
  const element = document.getElementById("problem");
  element.textContent = visible(sentence);
  element.hidden = false;
  ready();
  throw new Error(sentence);
}

// Marks the document as drawn, for programs that drive a browser.
export function ready() {
  document.documentElement.dataset.ready = "yes";
}

export function clearProblem() {
  document.getElementById("problem").hidden = true;
}

// A number of so many significant digits, or more: what stands before the point is never cut.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const kept = Math.max(digits, Math.trunc(Math.abs(value)).toString().length);
  const shown = Number(value.toPrecision(kept));
  return Math.abs(shown) < 1e-4 ? shown.toExponential() : shown.toLocaleString("en", { maximumSignificantDigits: kept });
}

// A return; of a rollout whose rewards name several roles those of each, never their sum.
export function returned(value, byRole) {
  const roles = Object.entries(byRole ?? {});
  return value === null && roles.length ? roles.map(([role, of]) => `${role} ${number(of)}`).join(", ") : number(value);
}

// A share of a whole in percent: 0 and 100 are none and all, never almost.
export function percent(part, whole) {
  const rounded = Math.round((100 * part) / whole);
  if (rounded === 0 && part > 0) return "< 1 %";
  return rounded === 100 && part < whole ? "> 99 %" : `${rounded} %`;
}

export function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  for (const [from, size, unit] of [[48 * 3600e3, 24 * 3600e3, "days"], [3600e3, 3600e3, "h"], [60e3, 60e3, "min"], [1e3, 1e3, "s"], [1, 1, "ms"]]) {
    if (milliseconds >= from) return `${Number((milliseconds / size).toPrecision(3))} ${unit}`;
  }
  return milliseconds > 0 ? `${Number((milliseconds * 1000).toPrecision(3))} µs` : "0 s";
}

export function time(milliseconds) {
  return milliseconds > 0 ? new Date(milliseconds).toISOString().replace("T", " ").slice(0, 19) : "–";
}

export function fact(name, ...values) {
  return h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, ...values));
}

export function facts(id, entries) {
  put(id, h("dl", {}, entries.filter(Boolean)));
}

export function title(text) {
  document.getElementById("title").textContent = visible(text);
  document.title = `${visible(text).slice(0, 120)} · spangrad`;
}

// A text of which the server has sent the beginning.
export function cut(value) {
  const missing = value.characters - [...value.text].length;
  return [value.text, missing > 0 ? h("em", { class: "cut" }, ` … ${missing.toLocaleString("en")} more characters`) : null];
}

// Tabs as ARIA describes them; the chosen one is part of the address.
export function tabs(onShow) {
  const buttons = [...document.querySelectorAll("[role=tab]")];
  const choose = (button, focus) => {
    for (const other of buttons) {
      const chosen = other === button;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) button.focus();
    history.replaceState(null, "", `${location.pathname}${location.search}#${button.getAttribute("aria-controls")}`);
    onShow(button.getAttribute("aria-controls"));
  };
  for (const [index, button] of buttons.entries()) {
    button.addEventListener("click", () => choose(button, false));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) choose(buttons[(index + step + buttons.length) % buttons.length], true);
    });
  }
  const first = buttons.find((button) => `#${button.getAttribute("aria-controls")}` === location.hash) ?? buttons[0];
  choose(first, false);
}
