"""The look and the script of the pages that `report_html` makes."""

# On a narrow screen each row becomes a card: its cells are labelled by the script, once for all
# rows, with a rule of style for each column.
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2024; --soft: #60656c;
  --line: #e0e3e7; --raised: #f5f6f8; --accent: #0b62b8; --bar: #6d7885; --note: #fff4d6;
  --fp32: #8a5a00; --bf16: #00795a; --fp16: #0068a8; --fp8: #a8447f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e7e9ec; --soft: #a0a7b0;
  --line: #2c3138; --raised: #1d2126; --accent: #6cb6ff; --bar: #8c98a5; --note: #3a3114;
  --fp32: #e0a640; --bf16: #2fbf94; --fp16: #56b4e9; --fp8: #dd88b8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1600px; padding: 20px 24px 32px; background: var(--page);
  color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 22px; font-weight: 650; overflow-wrap: anywhere; }
header p { margin: 2px 0 0; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px;
  margin: 16px 0 12px; }
figure { margin: 0; padding: 12px 14px; border: 1px solid var(--line); border-radius: 8px; }
figcaption { margin-bottom: 6px; font-weight: 600; }
figure p { margin: 0; color: var(--soft); }
.bar { display: grid; grid-template-columns: 1fr auto; gap: 0 12px; margin-top: 6px;
  font-size: 13px; }
.bar span { overflow-wrap: anywhere; }
.bar b { font-weight: 500; font-variant-numeric: tabular-nums; color: var(--soft); }
.bar i { grid-column: 1 / -1; height: 5px; border-radius: 3px; background: var(--bar); }
.bar[data-format^="float32"] i, .bar[data-format^="float64"] i { background: var(--fp32); }
.bar[data-format^="bfloat16"] i { background: var(--bf16); }
.bar[data-format^="float16"] i { background: var(--fp16); }
.bar[data-format^="float8"] i { background: var(--fp8); }
.note { margin: 0 0 12px; padding: 8px 12px; border-radius: 8px; background: var(--note);
  overflow-wrap: anywhere; }
.filters { display: flex; flex-wrap: wrap; align-items: end; gap: 10px 12px; margin: 0 0 10px; }
.filters label { display: flex; flex-direction: column; gap: 2px; font-size: 12px;
  color: var(--soft); }
.filters input, .filters select { height: 34px; padding: 0 8px; border: 1px solid var(--line);
  border-radius: 6px; background: var(--raised); color: var(--ink); font: inherit;
  font-size: 14px; }
.filters .find { flex: 1 1 220px; }
.filters .order { display: none; }
#count { min-width: 9em; padding-bottom: 7px; color: var(--soft); text-align: right;
  font-variant-numeric: tabular-nums; }
.scroll { max-height: 88vh; overflow: auto; border: 1px solid var(--line); border-radius: 8px; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 13px; }
th { position: sticky; top: 0; z-index: 1; padding: 0; background: var(--raised);
  border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th button { width: 100%; padding: 8px 10px; border: 0; background: none; color: inherit;
  font: inherit; font-weight: 600; text-align: inherit; cursor: pointer; }
th button::after { content: ""; display: inline-block; width: 1em; color: var(--accent);
  text-align: right; }
th.n button::after { display: none; }
th.n button::before { content: ""; display: inline-block; width: 1em; color: var(--accent);
  text-align: left; }
th[aria-sort="ascending"] button::after, th.n[aria-sort="ascending"] button::before {
  content: "\\2191"; }
th[aria-sort="descending"] button::after, th.n[aria-sort="descending"] button::before {
  content: "\\2193"; }
td { padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover td { background: var(--raised); }
th.n, td.n { text-align: right; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
#more { display: block; margin: 12px auto 0; padding: 8px 18px; border: 1px solid var(--line);
  border-radius: 6px; background: var(--raised); color: var(--accent); font: inherit;
  cursor: pointer; }
#more[hidden] { display: none; }
tr[hidden] { display: none !important; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
@media (max-width: 760px) {
  body { padding: 14px 12px 24px; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; }
  .filters label { flex: 1 1 40%; }
  .filters .find { flex-basis: 100%; }
  .filters .order { display: flex; }
  .filters input, .filters select { font-size: 16px; height: 40px; }
  #count { flex-basis: 100%; text-align: left; }
  .scroll { max-height: none; overflow: visible; border: 0; }
  table, tbody { display: block; }
  thead { display: none; }
  tbody tr { display: block; margin-bottom: 8px; padding: 8px 12px; border: 1px solid var(--line);
    border-radius: 8px; content-visibility: auto; contain-intrinsic-size: auto 220px; }
  tbody td { display: grid; grid-template-columns: 6.5em 1fr; padding: 2px 0; border: 0; }
  tbody td:empty { display: none; }
  td.n { text-align: left; white-space: normal; }
  td { overflow-wrap: anywhere; }
  td::before { color: var(--soft); }
  tbody tr:hover td { background: none; }
}
@media print { .filters { display: none; } .scroll { max-height: none; overflow: visible; } }
"""

SCRIPT = """
"use strict";
(() => {
  const table = document.querySelector("table"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const names = heads.map((head) => head.textContent.trim());
  const find = document.getElementById("find"), order = document.getElementById("order");
  const selects = [...document.querySelectorAll("select[data-kind]")];
  const count = document.getElementById("count"), what = count.dataset.what;
  const words = new Intl.Collator(undefined, { numeric: true });
  const texts = new Map(rows.map((row) => [row, [...row.cells]
    .map((cell) => cell.textContent + " " + cell.title).join(" ").toLowerCase()]));
  const more = document.getElementById("more");
  let ordered = [...rows], wanted = [], most = 400;

  const labels = document.createElement("style");
  labels.textContent = "@media (max-width: 760px) {" + names.map((name, at) =>
    `td:nth-child(${at + 1})::before { content: ${JSON.stringify(name)}; }`).join("") + "}";
  document.head.append(labels);

  function sort(at, upwards) {
    const numeric = heads[at].classList.contains("n"), sign = upwards ? 1 : -1;
    const keys = new Map(rows.map((row) => [row, numeric ? Number(row.cells[at].dataset.v)
      : row.cells[at].textContent]));
    const by = numeric ? (a, b) => a - b : words.compare;
    ordered.sort((a, b) => sign * by(keys.get(a), keys.get(b)));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[at].setAttribute("aria-sort", upwards ? "ascending" : "descending");
    order.value = String(at);
    show();
    body.append(...ordered);
  }

  function fits(row) {
    return wanted.every((word) => texts.get(row).includes(word)) &&
      selects.every((s) => !s.value || row.dataset["k" + s.dataset.kind] === s.value);
  }

  // A browser takes seconds to lay out thousands of rows: the first ones are shown, the others
  // when they are asked for.
  function show() {
    let found = 0;
    for (const row of ordered) row.hidden = !(fits(row) && ++found <= most);
    const noun = what + (rows.length === 1 ? "" : "s"), all = rows.length.toLocaleString("en");
    count.textContent = found === rows.length ? `${all} ${noun}`
      : `${found.toLocaleString("en")} of ${all} ${noun}`;
    more.hidden = found <= most;
    more.textContent = `show ${(found - most).toLocaleString("en")} more`;
  }

  function filter() {
    wanted = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
    show();
  }

  // Numbers begin with the largest, but for the order in the program; texts with the first.
  const first = (at) => !heads[at].classList.contains("n") || names[at] === "#";
  heads.forEach((head, at) => head.firstElementChild.addEventListener("click", () => {
    const now = head.getAttribute("aria-sort");
    sort(at, now ? now === "descending" : first(at));
  }));
  order.addEventListener("change", () => sort(Number(order.value), first(Number(order.value))));
  find.addEventListener("input", filter);
  selects.forEach((select) => select.addEventListener("change", filter));
  more.addEventListener("click", () => { most = Infinity; show(); });
  find.form.addEventListener("submit", (event) => event.preventDefault());
  filter();
})();
"""
