// Sorting and filtering of the table of tolerances; without scripts the table is all there.
(() => {
  const table = document.getElementById("t-tolerances");
  if (!table) return;
  const body = table.tBodies[0], rows = [...body.rows], head = [...table.tHead.rows[0].cells];
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.innerHTML = '<input type="search" placeholder="Filter rows" aria-label="Filter rows">' +
    '<label><input type="checkbox"> only what did not pass</label><span class="dim" role="status"></span>';
  table.parentNode.before(tools);
  const [search, bad] = tools.querySelectorAll("input"), status = tools.querySelector("span");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    let seen = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase(), red = row.cells[0].className !== "pass";
      row.hidden = (bad.checked && !red) || !words.every((word) => text.includes(word));
      seen += !row.hidden;
    }
    status.textContent = `${seen.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
  };
  const key = (row, at) => {
    const text = row.cells[at]?.textContent.trim() ?? "";
    const number = Number(text.replaceAll(",", ""));
    return text === "" ? [-1, 0] : Number.isNaN(number) ? [1, text] : [0, number];
  };
  const sort = (at) => {
    const up = head[at].ariaSort !== "ascending";
    head.forEach((cell) => cell.removeAttribute("aria-sort"));
    head[at].ariaSort = up ? "ascending" : "descending";
    const keyed = rows.map((row) => [key(row, at), row]);
    keyed.sort(([[a, x]], [[b, y]]) => (up ? 1 : -1) * (a - b || (x < y ? -1 : x > y ? 1 : 0)));
    body.append(...keyed.map(([, row]) => row));
  };
  table.classList.add("sortable");
  head.forEach((cell, at) => {
    cell.tabIndex = 0;
    cell.addEventListener("click", () => sort(at));
    cell.addEventListener("keydown", (event) => event.key === "Enter" && sort(at));
  });
  tools.addEventListener("input", filter);
  filter();
})();
