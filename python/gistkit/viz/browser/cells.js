// The cells of a map: unpacked, put into an order, and halved again and again for a look from afar.
// A cell is 0, or shades * role + shade with a shade from 1.

const inflate = async (base64) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

// Cells whose row i is that of the token rows[i], and so for the columns.
const arrange = (cells, rows, columns) => {
  const moved = new Uint8Array(cells.length);
  const width = columns.length;
  for (let row = 0; row < rows.length; row++) {
    const [to, from] = [row * width, rows[row] * width];
    for (let column = 0; column < width; column++) moved[to + column] = cells[from + columns[column]];
  }
  return moved;
};

// What four cells are from afar: the largest, or with `mean` the role of the one with the largest shade, and the mean
// of their shades.
const pooling = (shades, mean) => {
  if (!mean) return Math.max;
  const shade = (cell) => (cell ? ((cell - 1) % shades) + 1 : 0);
  return (a, b, c, d) => {
    if (!(a | b | c | d)) return 0;
    let [most, sum] = [a, shade(a)];
    for (const cell of [b, c, d]) {
      if (shade(cell) > shade(most)) most = cell;
      sum += shade(cell);
    }
    return most - shade(most) + Math.ceil(sum / 4);
  };
};

const halve = ({ cells, rows, width, factor }, pool) => {
  const half = { rows: (rows + 1) >> 1, width: (width + 1) >> 1, factor: 2 * factor };
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

// Copies from fine to coarse; the coarsest has no side of more than 256 cells.
const copiesOf = (cells, rows, width, pool) => {
  const copies = [{ cells, rows, width, factor: 1 }];
  while (Math.max(copies.at(-1).rows, copies.at(-1).width) > 256) copies.push(halve(copies.at(-1), pool));
  return copies;
};

// Paints a copy, a pixel a cell, on a canvas of its own.
const paint = (copy, palette) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: copy.width, height: copy.rows });
  const context = canvas.getContext("2d");
  const image = context.createImageData(copy.width, copy.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = Uint32Array.from(palette, (colour) => {
    const number = parseInt(colour.slice(1), 16);
    return ((255 << 24) | ((number & 255) << 16) | (number & 0xff00) | (number >> 16)) >>> 0;
  });
  for (let at = 0; at < pixels.length; at++) pixels[at] = colours[copy.cells[at]];
  context.putImageData(image, 0, 0);
  return canvas;
};
