// A map on a canvas: a row a query, a column a key, roles along both sides, the chosen tokens framed. Zoom and pan.

const MARGIN = { left: 44, top: 8, right: 2, bottom: 44 };
const STRIP = 10;

// Round numbers from low to high, some `most` of them.
const ticksOf = (low, high, most) => {
  const rough = Math.max((high - low) / most, 1e-9);
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * ten >= rough) * ten, 1);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, at) => (first + at) * step);
};

// Runs of equal neighbours: [first, after the last, value].
const runsOf = (values) => {
  const starts = [];
  for (let at = 0; at < values.length; at++) if (at === 0 || values[at] !== values[at - 1]) starts.push(at);
  return starts.map((start, at) => [start, starts[at + 1] ?? values.length, values[start]]);
};

// Makes a canvas as sharp as the screen, and returns its context, which counts in CSS pixels.
const sharp = (canvas) => {
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = context.strokeStyle = getComputedStyle(canvas).color;
  context.font = "12px sans-serif";
  return context;
};

class MatrixView {
  // `moved` is called when another part of the map is shown.
  constructor(canvas, rows, width, moved) {
    Object.assign(this, { canvas, rows, width, moved, copies: [], roles: {}, chosen: {} });
    this.span = 1;
    this.corner = [0, 0];
    this.#listen();
  }

  // Columns and rows in view: [first, after the last], in fractions of cells.
  get columns() { return [this.corner[0] * this.width, (this.corner[0] + this.span) * this.width]; }
  get lines() { return [this.corner[1] * this.rows, (this.corner[1] + this.span) * this.rows]; }
  get frame() {
    return { left: MARGIN.left, top: MARGIN.top, width: this.canvas.clientWidth - MARGIN.left - MARGIN.right,
             height: this.canvas.clientHeight - MARGIN.top - MARGIN.bottom };
  }

  // The cell at a place of the canvas, [row, column], or null.
  at(x, y) {
    const { left, top, width, height } = this.frame;
    const parts = [(x - left) / width, (y - top) / height];
    if (parts.some((part) => part < 0 || part >= 1)) return null;
    const [column, row] = parts.map((part, axis) => this.corner[axis] + part * this.span);
    return [Math.floor(row * this.rows), Math.floor(column * this.width)];
  }

  // Shows `factor` as much of each side; the place (x, y) of the frame, from 0 to 1, stays where it is.
  zoom(factor, x = 0.5, y = 0.5) {
    const least = Math.min(1, 4 / Math.min(this.rows, this.width));
    const span = Math.min(1, Math.max(least, this.span * factor));
    this.show(span, [this.corner[0] + x * (this.span - span), this.corner[1] + y * (this.span - span)]);
  }

  show(span, corner) {
    this.span = span;
    this.corner = corner.map((start) => Math.min(1 - span, Math.max(0, start)));
    // With a finger the page scrolls, until there is something to pan.
    this.canvas.style.touchAction = span < 1 ? "none" : "pan-y";
    this.draw();
    this.moved();
  }

  draw() {
    const { canvas, copies, frame: { left, top, width, height } } = this;
    if (!copies.length || width < 1) return;
    const context = sharp(canvas);
    const [first, last] = this.columns;
    const [upper, lower] = this.lines;
    const cells = Math.max((last - first) / width, (lower - upper) / height) / devicePixelRatio;
    const copy = copies.find(({ factor }) => factor >= cells) ?? copies.at(-1);
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.imageSmoothingEnabled = false;
    const [x, y] = [first / copy.factor, upper / copy.factor];
    context.drawImage(copy.canvas, x, y, last / copy.factor - x, lower / copy.factor - y, left, top, width, height);
    const across = (column) => left + ((column - first) / (last - first)) * width;
    const down = (row) => top + ((row - upper) / (lower - upper)) * height;
    if (width / (last - first) > 8) this.#grid(context, across, down);
    this.#frames(context, across, down);
    context.restore();
    context.globalAlpha = 0.5;
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    context.globalAlpha = 1;
    this.#sides(context, across, down);
  }

  // Lines between the cells.
  #grid(context, across, down) {
    const { left, top, width, height } = this.frame;
    context.globalAlpha = 0.15;
    const bounds = ([low, high]) => Array.from({ length: Math.ceil(high - low) + 1 }, (_, at) => Math.floor(low) + at);
    for (const column of bounds(this.columns)) context.fillRect(across(column) - 0.5, top, 1, height);
    for (const row of bounds(this.lines)) context.fillRect(left, down(row) - 0.5, width, 1);
    context.globalAlpha = 1;
  }

  // Frames around the rows and columns that are chosen.
  #frames(context, across, down) {
    const { left, top, width, height } = this.frame;
    const { rows, columns, colour } = this.chosen;
    context.save();
    [context.strokeStyle, context.lineWidth] = [colour, 2];
    for (const [start, end] of runsOf(rows ?? []).filter(([, , is]) => is)) {
      context.strokeRect(left + 1, down(start) - 1, width - 2, down(end) - down(start) + 2);
    }
    for (const [start, end] of runsOf(columns ?? []).filter(([, , is]) => is)) {
      context.strokeRect(across(start) - 1, top + 1, across(end) - across(start) + 2, height - 2);
    }
    context.restore();
  }

  // Roles, numbers and names along both sides.
  #sides(context, across, down) {
    const { left, top, width, height } = this.frame;
    const within = (low, high) => (at) => Math.min(high, Math.max(low, at));
    const [fitX, fitY] = [within(left, left + width), within(top, top + height)];
    context.save();
    for (const [start, end, colour] of this.roles.rows ?? []) {
      context.fillStyle = colour;
      context.fillRect(left - STRIP - 2, fitY(down(start)), STRIP, fitY(down(end)) - fitY(down(start)));
    }
    for (const [start, end, colour] of this.roles.columns ?? []) {
      context.fillStyle = colour;
      context.fillRect(fitX(across(start)), top + height + 2, fitX(across(end)) - fitX(across(start)), STRIP);
    }
    context.restore();
    context.textAlign = "center";
    for (const tick of ticksOf(this.columns[0], this.columns[1] - 1, width / 60)) {
      context.fillText(tick, across(tick + 0.5), top + height + 26);
    }
    context.fillText("token looked at (key)", left + width / 2, top + height + 41);
    const upright = (text, x, y) => {
      context.save();
      context.translate(x, y);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    };
    for (const tick of ticksOf(this.lines[0], this.lines[1] - 1, height / 60)) upright(tick, left - 17, down(tick + 0.5));
    upright("token that looks (query)", 11, top + height / 2);
  }

  #listen() {
    const { canvas } = this;
    let before = null;
    canvas.addEventListener("wheel", (event) => {
      const { left, top, width, height } = this.frame;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.offsetX - left) / width, (event.offsetY - top) / height);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      before = [event.offsetX, event.offsetY];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!before || !event.buttons || this.span === 1) return;
      const { width, height } = this.frame;
      const [x, y] = [event.offsetX - before[0], event.offsetY - before[1]];
      before = [event.offsetX, event.offsetY];
      this.show(this.span, [this.corner[0] - (x / width) * this.span, this.corner[1] - (y / height) * this.span]);
    });
    canvas.addEventListener("pointerup", () => { before = null; });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 0.8 : 1.25);
      if (!step || this.span === 1) return;
      event.preventDefault();
      this.show(this.span, this.corner.map((start, axis) => start + 0.1 * this.span * step[axis]));
    });
    new ResizeObserver(() => { this.draw(); this.moved(); }).observe(canvas);
  }
}
