// A table's accuracies as dots with intervals on one scale: a line for each row and column.
// Labels and numbers are text beside the plot. A hollow dot is one seed; the tick in a line is the
// reference row in the same column, in tables of one or two columns. Places are shares of the width, so nothing is drawn twice.
function dotChart(host, grid) {
  const cells = grid.cells.flat().filter(Boolean);
  const [low, high] = range(cells.flatMap(({ mean, half }) => [mean - (half ?? 0), mean + (half ?? 0)]), 0.08);
  const at = (value) => `${(100 * (value - low) / (high - low)).toFixed(2)}%`;
  const marks = ticks(low, high, 4), several = grid.columns.length > 1;
  const compared = grid.contrasts.find((contrast) => !contrast.turned);
  const reference = compared && grid.columns.length < 3 ? grid.rows.indexOf(compared.against) : -1;
  const described = [], lines = [];
  grid.rows.forEach((row, r) => {
    const filled = grid.columns.map((column, c) => ({ column, c, cell: grid.cells[r][c] })).filter(({ cell }) => cell);
    if (!filled.length) return;
    lines.push(html("div", { class: "name", style: `--lines:${filled.length}` }, row));
    for (const { column, c, cell } of filled) {
      const against = reference < 0 || reference === r ? null : grid.cells[reference][c];
      if (several) lines.push(html("div", { class: "where" }, column));
      lines.push(strip(cell, against, marks, at), html("div", { class: "value" },
        `${within(cell.mean, cell.half)}${cell.untrained ? " †" : ""}${cell.half === null ? " (1 seed)" : ""}`));
      described.push(`${row}${several ? `, ${column}` : ""}: ${within(cell.mean, cell.half)}, ${counted(cell.seeds.length, "seed")}`);
    }
  });
  const axis = html("div", { class: "scale" }, ...marks.map((mark) =>
    html("span", { style: `left:${at(mark.at)}` }, mark.text)));
  host.append(html("div", { class: "dots-host" }, html("div", { class: several ? "dots several" : "dots", role: "img",
    "aria-label": `${grid.title}: ${described.join("; ")}` }, ...lines, axis, html("div", { class: "scale-name" }, "test accuracy, %"))),
  html("figcaption", {}, dotCaption(grid, cells, reference)));
}

function strip(cell, against, marks, at) {
  const alone = cell.half === null, upright = { y1: "0", y2: "100%" };
  const picture = svg("svg", { "aria-hidden": "true" },
    ...marks.map((mark) => svg("line", { class: "rule", x1: at(mark.at), x2: at(mark.at), ...upright })));
  if (against) picture.append(svg("line", { class: "reference", x1: at(against.mean), x2: at(against.mean), ...upright }));
  if (!alone) {
    const [from, to] = [at(cell.mean - cell.half), at(cell.mean + cell.half)];
    picture.append(svg("line", { class: "whisker", x1: from, x2: to, y1: "50%", y2: "50%" }));
  }
  picture.append(svg("circle", { class: alone ? "dot hollow" : "dot", cx: at(cell.mean), cy: "50%", r: 3.6 }));
  return html("div", { class: "strip" }, picture);
}

function dotCaption(grid, cells, reference) {
  return [`${grid.title}: test accuracy, mean over seeds`,
    cells.some((cell) => cell.half !== null) ? "bars: 95 % intervals" : "",
    cells.some((cell) => cell.half === null) ? "hollow dots: 1 seed" : "",
    reference < 0 ? "" : `dashed: ${grid.rows[reference]}`,
    cells.some((cell) => cell.untrained) ? "†: best before training in some seeds" : "",
  ].filter(Boolean).join("; ") + ".";
}
