// A table's accuracies as dots with intervals, a panel for each column, all on one scale.
// If there are more columns than rows and no row is a reference, a panel is a row.
// A hollow dot is one seed; the dashed line is the reference row.
function dotChart(host, table) {
  const rowwise = table.contrasts.filter((contrast) => !contrast.turned);
  const turned = table.columns.length > table.rows.length && !rowwise.length;
  const grid = !turned ? table : { ...table, rows: table.columns, columns: table.rows,
    cells: table.columns.map((_, c) => table.rows.map((_, r) => table.cells[r][c])) };
  const cells = grid.cells.flat().filter(Boolean);
  const [low, high] = range(cells.flatMap(({ mean, half }) => [mean - (half ?? 0), mean + (half ?? 0)]), 0.08);
  const against = rowwise.length ? grid.rows.indexOf(rowwise[0].against) : -1;
  const panels = html("div", { class: "panels" });
  grid.columns.forEach((column, c) => {
    const rows = grid.rows.map((row, r) => ({ row, cell: grid.cells[r][c] })).filter(({ cell }) => cell);
    if (!rows.length) return;
    const panel = html("div", {});
    panels.append(html("div", { class: "panel" }, panel));
    const reference = against < 0 ? null : grid.cells[against][c];
    drawn(panel, (width) => panel.replaceChildren(dots(grid, column, rows, reference, low, high, width)));
  });
  host.append(panels);
}

function dots(grid, column, rows, reference, low, high, width) {
  const each = 36, top = grid.columns.length > 1 ? 26 : 4, left = 6, right = 14;
  const floor = top + rows.length * each, height = floor + 36;
  const px = (value) => left + (value - low) / (high - low) * (width - left - right);
  const values = rows.map(({ row, cell }) => `${row}: ${within(cell.mean, cell.half)}, ${counted(cell.seeds.length, "seed")}`);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" },
    svg("title", {}, `${grid.title}${grid.columns.length > 1 ? `, ${column}` : ""}`),
    svg("desc", {}, values.join("; ")));
  if (grid.columns.length > 1) picture.append(svg("text", { class: "strong", x: left, y: 15 }, column));
  for (const { at: value, text } of ticks(low, high, 4)) {
    picture.append(svg("path", { class: "rule", d: `M${px(value)} ${top}V${floor}` }),
      svg("text", { x: px(value), y: floor + 15, "text-anchor": "middle" }, text));
  }
  picture.append(svg("text", { class: "label", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "test accuracy, %"));
  if (reference) picture.append(svg("path", { class: "reference", d: `M${px(reference.mean)} ${top}V${floor}` }));
  rows.forEach(({ row, cell }, place) => {
    const y = top + place * each + 25, alone = cell.half === null;
    picture.append(svg("text", { x: left, y: y - 10, class: "row" }, row),
      svg("text", { x: width - right, y: y - 10, "text-anchor": "end", class: "row" },
        `${within(cell.mean, cell.half)}${cell.untrained ? " †" : ""}${alone ? " (1 seed)" : ""}`));
    if (!alone) {
      picture.append(svg("path", { class: "whisker", 
        d: `M${px(cell.mean - cell.half)} ${y - 4}v8m0 -4H${px(cell.mean + cell.half)}m0 -4v8` }));
    }
    picture.append(svg("circle", { class: alone ? "dot hollow" : "dot", cx: px(cell.mean), cy: y, r: 3.6 }));
  });
  return picture;
}
