"use strict";
(() => {
  const table = document.querySelector("table"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const names = heads.map((head) => head.textContent.trim());
  const find = document.getElementById("find");
  const count = document.getElementById("count");
  const words = new Intl.Collator(undefined, { numeric: true });
  const texts = new Map(rows.map((row) => [row, [...row.cells]
    .map((cell) => cell.textContent).join(" ").toLowerCase()]));
  const more = document.getElementById("more");
  let ordered = [...rows], wanted = [], most = 400;

  function sort(at, upwards) {
    const numeric = heads[at].classList.contains("n"), sign = upwards ? 1 : -1;
    const keys = new Map(rows.map((row) => [row, numeric ? Number(row.cells[at].dataset.v)
      : row.cells[at].textContent]));
    const by = numeric ? (a, b) => a - b : words.compare;
    ordered.sort((a, b) => sign * by(keys.get(a), keys.get(b)));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[at].setAttribute("aria-sort", upwards ? "ascending" : "descending");
    show();
    body.append(...ordered);
  }

  const fits = (row) => wanted.every((word) => texts.get(row).includes(word));

  // A browser takes seconds to lay out thousands of rows: the first ones are shown, the others
  // when they are asked for.
  function show() {
    let found = 0;
    for (const row of ordered) row.hidden = !(fits(row) && ++found <= most);
    const noun = rows.length === 1 ? "row" : "rows", all = rows.length.toLocaleString("en");
    count.textContent = found === rows.length ? `${all} ${noun}`
      : `${found.toLocaleString("en")} of ${all} ${noun}`;
    more.hidden = found <= most;
    more.textContent = `show ${(found - most).toLocaleString("en")} more`;
  }

  function filter() {
    wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    show();
  }

  // Numbers begin with the largest, but for the order in the program; texts with the first.
  const first = (at) => !heads[at].classList.contains("n") || names[at] === "#";
  heads.forEach((head, at) => head.firstElementChild.addEventListener("click", () => {
    const now = head.getAttribute("aria-sort");
    sort(at, now ? now === "descending" : first(at));
  }));
  find.addEventListener("input", filter);
  more.addEventListener("click", () => { most = Infinity; show(); });
  find.form.addEventListener("submit", (event) => event.preventDefault());
  filter();
})();
