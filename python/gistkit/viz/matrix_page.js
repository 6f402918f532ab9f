// Draws the cells of a page in copies from fine to coarse, and shows the one that fits the zoom.
// A cell is 0, or shades * role + shade with a shade from 1; a coarse cell stands for four of the copy before it.
export default async ({ plot, grids, queries, keys, strips, maps, map, order, copies, shades, mean }) => {
  const state = document.getElementById("state");
  const { ndarray } = Bokeh.require("core/util/ndarray");
  const logical = new Map([queries, keys].map((side) => [side, side.data]));

  const inflate = async (bytes) => {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  // Puts the tokens of one side into the chosen order; returns their places in the logical one.
  const arrange = (side) => {
    const data = logical.get(side);
    const places = Array.from(order.active == 1 ? data.physical : data.place);
    const moved = Object.entries(data).map(([name, values]) => [name, places.map((place) => values[place])]);
    side.data = { ...Object.fromEntries(moved), place: data.place };
    return places;
  };

  // A bar for each run of tokens of one role.
  const fill = (strip, { colour }) => {
    if (colour == null) return;
    const starts = colour.flatMap((its, at) => (its === colour[at - 1] ? [] : [at]));
    const ends = [...starts.slice(1), colour.length];
    const edges = (places) => places.map((place) => place - 0.5);
    strip.data = { start: edges(starts), end: edges(ends), colour: starts.map((at) => colour[at]) };
  };

  const shade = (cell) => (cell ? ((cell - 1) % shades) + 1 : 0);
  const pool = !mean ? Math.max : (a, b, c, d) => {
    if (!(a | b | c | d)) return 0;
    let [most, sum] = [a, shade(a)];
    for (const cell of [b, c, d]) {
      if (shade(cell) > shade(most)) most = cell;
      sum += shade(cell);
    }
    return most - shade(most) + Math.ceil(sum / 4);
  };

  const halve = ({ cells, rows, width }) => {
    const half = { rows: (rows + 1) >> 1, width: (width + 1) >> 1 };
    half.cells = new Uint8Array(half.rows * half.width);
    for (let row = 0; row < half.rows; row++) {
      const below = 2 * row + 1 < rows ? width : 0;
      for (let column = 0; column < half.width; column++) {
        const at = 2 * row * width + 2 * column;
        const right = 2 * column + 1 < width ? 1 : 0;
        half.cells[row * half.width + column] = pool(
          cells[at], right && cells[at + 1], below && cells[at + below], right && below && cells[at + below + 1],
        );
      }
    }
    return half;
  };

  const draw = async () => {
    const cells = await inflate(maps[map.options.indexOf(map.value)]);
    const rows = arrange(queries);
    const places = queries === keys ? rows : arrange(keys);
    [queries, keys].forEach((side, at) => fill(strips[at], side.data));
    const width = places.length;
    const moved = new Uint8Array(cells.length);
    for (let row = 0; row < rows.length; row++) {
      const [to, from] = [row * width, rows[row] * width];
      for (let column = 0; column < width; column++) moved[to + column] = cells[from + places[column]];
    }
    let copy = { cells: moved, rows: rows.length, width };
    copies.forEach(({ source }, at) => {
      if (at) copy = halve(copy);
      source.data = { image: [ndarray(copy.cells, { dtype: "uint8", shape: [copy.rows, copy.width] })] };
    });
    choose();
    state.hidden = true;
  };

  // A cell of the copy that is shown takes a pixel of the screen or more.
  const choose = () => {
    const { x_range, y_range, inner_width, inner_height } = plot;
    const cells = Math.max(
      Math.abs(x_range.end - x_range.start) / inner_width, Math.abs(y_range.end - y_range.start) / inner_height,
    );
    const fitting = copies.findIndex(({ factor }) => factor * devicePixelRatio >= cells);
    const shown = fitting < 0 ? copies.length - 1 : fitting;
    copies.forEach(({ renderer }, at) => { renderer.visible = at == shown; });
    for (const grid of grids) grid.visible = cells < 1 / 8;
  };

  const careful = async () => {
    try {
      await draw();
    } catch (error) {
      state.hidden = false;
      state.textContent = `This browser could not draw the page: ${error}`;
      throw error;
    }
  };
  for (const range of [plot.x_range, plot.y_range]) {
    for (const end of ["start", "end"]) range.properties[end].change.connect(choose);
  }
  map.properties.value.change.connect(careful);
  order.properties.active.change.connect(careful);
  await careful();
};
