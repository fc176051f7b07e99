// A table of any length: rows are asked for as they come into view, and only those in view are in the document.
import { h, visible } from "/static/dom.js";

const ROW = 34; // pixels; page.css has the same
const BEYOND = 12; // rows drawn above and below the view

export class VirtualTable {
  // columns: [{name, title, cell(row) -> node or text, sort, wide, number}], more(after, signal) -> {rows, after}
  constructor(region, { columns, label, more, first, sort, onSort }) {
    this.region = region;
    this.columns = columns;
    this.more = more;
    this.first = first; // the first page, where it is here already
    this.rows = [];
    this.after = undefined; // undefined: nothing asked yet; null: all rows are here
    this.asking = null;
    this.body = h("tbody");
    const focused = region.contains(document.activeElement) ? document.activeElement.dataset.sort : undefined;
    this.table = h("table", { "aria-rowcount": -1 },
      h("caption", { class: "hidden" }, label),
      h("thead", {}, h("tr", {}, columns.map((column) => this.head(column, sort, onSort)))),
      this.body);
    region.replaceChildren(this.table);
    // A table that takes another's place, since a heading was pressed, has the focus where that had it.
    if (focused) [...region.querySelectorAll("[data-sort]")].find((button) => button.dataset.sort === focused)?.focus({ preventScroll: true });
    this.closing = new AbortController();
    const { signal } = this.closing;
    region.addEventListener("scroll", () => this.draw(), { passive: true, signal });
    region.addEventListener("keydown", (event) => this.key(event), { signal });
    this.resizes = new ResizeObserver(() => this.draw());
    this.resizes.observe(region);
  }

  // Another table takes its place: it asks for nothing more.
  close() {
    this.closing.abort();
    this.resizes.disconnect();
  }

  head(column, sort, onSort) {
    const attributes = { scope: "col", class: this.kind(column) };
    if (!column.sort) return h("th", attributes, column.title);
    const current = sort.sort === column.sort;
    if (current) attributes["aria-sort"] = sort.order === "asc" ? "ascending" : "descending";
    const arrow = current ? (sort.order === "asc" ? " ↑" : " ↓") : "";
    return h("th", attributes, h("button", { type: "button", "data-sort": column.sort, onclick: () => onSort(column.sort) }, column.title + arrow));
  }

  kind(column) {
    return [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || null;
  }

  async fill() {
    const { signal } = this.closing;
    if (this.asking || this.after === null || signal.aborted) return;
    this.asking = this.first ?? this.more(this.after, signal);
    this.first = null;
    try {
      const { rows, after } = await this.asking;
      this.rows.push(...rows);
      this.after = after;
    } catch (error) {
      if (error.name === "AbortError") return;
      throw error;
    } finally {
      this.asking = null;
    }
    this.table.setAttribute("aria-rowcount", String(this.after === null ? this.rows.length + 1 : -1));
    this.draw();
  }

  draw() {
    const height = this.region.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.region.scrollTop / ROW) - BEYOND);
    const last = Math.min(this.rows.length, Math.ceil((this.region.scrollTop + height) / ROW) + BEYOND);
    if (this.drawn !== `${first} ${last} ${this.rows.length}`) {
      this.drawn = `${first} ${last} ${this.rows.length}`;
      const focused = this.focused();
      const control = focused ? controls(focused).indexOf(document.activeElement) : -1;
      this.body.replaceChildren(
        this.space(first), ...this.rows.slice(first, last).map((row, at) => this.row(row, first + at)), this.space(this.rows.length - last));
      if (focused) controls(this.body.querySelector(`tr[aria-rowindex="${focused.getAttribute("aria-rowindex")}"]`))[control]?.focus({ preventScroll: true });
    }
    if (last + BEYOND >= this.rows.length) this.fill();
  }

  // The row of this table, not of another of its page, that has the focus.
  focused() {
    const row = document.activeElement?.closest?.("tr[aria-rowindex]");
    return row && this.body.contains(row) ? row : null;
  }

  row(row, index) {
    return h("tr", { "aria-rowindex": index + 2 }, this.columns.map((column) => {
      const cell = column.cell(row);
      return h("td", { class: this.kind(column), title: typeof cell === "string" ? visible(cell).slice(0, 300) : null }, cell);
    }));
  }

  space(count) {
    return h("tr", { class: "space", "aria-hidden": "true" }, h("td", { colspan: this.columns.length, style: { height: `${count * ROW}px` } }));
  }

  // Arrow keys and j, k go from row to row: the row's first link has the focus. Rows without links are scrolled by the browser.
  key(event) {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey || !this.body.querySelector("a")) return;
    const focused = this.focused()?.getAttribute("aria-rowindex");
    const index = focused ? Number(focused) - 2 + step : Math.ceil(this.region.scrollTop / ROW);
    if (index < 0 || index >= this.rows.length) return;
    event.preventDefault();
    const top = index * ROW;
    if (top < this.region.scrollTop) this.region.scrollTop = top;
    if (top + 3 * ROW > this.region.scrollTop + this.region.clientHeight) this.region.scrollTop = top + 3 * ROW - this.region.clientHeight;
    this.draw();
    this.body.querySelector(`tr[aria-rowindex="${index + 2}"] a`)?.focus({ preventScroll: true });
  }
}

function controls(row) {
  return [...(row?.querySelectorAll("a, button") ?? [])];
}
