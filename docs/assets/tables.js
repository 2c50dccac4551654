// Tables of 15 rows or more get a filter; a click on a header sorts. Nothing is loaded for it.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.querySelectorAll("tbody tr")]
    const cell = (row, k) => row.cells[k]?.textContent.trim() ?? ""
    table.querySelectorAll("th").forEach((head, k) => {
      head.dataset.sort = ""
      head.addEventListener("click", () => {
        const sign = head.dataset.sort === "1" ? -1 : 1
        table.querySelectorAll("th").forEach((h) => (h.dataset.sort = ""))
        head.dataset.sort = sign
        rows.sort((a, b) => sign * cell(a, k).localeCompare(cell(b, k), undefined, { numeric: true }))
        rows.forEach((row) => row.parentNode.append(row))
      })
    })
    if (rows.length < 15) continue
    const filter = Object.assign(document.createElement("input"), {
      type: "search", className: "table-filter", placeholder: `Filter ${rows.length} rows`,
    })
    filter.setAttribute("aria-label", "filter the table")
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/)
      for (const row of rows) row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w))
    })
    const place = table.closest(".md-typeset__scrollwrap") ?? table
    place.before(filter)
  }
})
