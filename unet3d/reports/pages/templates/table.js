// Makes the headings of tables buttons that sort: names by their letters, numbers by their size.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const turns = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", turns ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      const isNumber = heading.classList.contains("n");
      const compare = (a, b) => {
        if (!isNumber) return text(a).localeCompare(text(b), undefined, { numeric: true });
        const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
        // What has no number comes last, in both directions.
        if (isNaN(x) || isNaN(y)) return (turns ? -1 : 1) * (isNaN(x) - isNaN(y));
        return x - y;
      };
      const rows = [...body.rows].sort((a, b) => (turns ? -1 : 1) * compare(a, b));
      body.append(...rows);
    });
  });
}
