// The position IDs of the keys, below the map and as wide: a mark a token, of its role's shape and colour.

const SHAPES = [
  [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  Array.from({ length: 16 }, (_, at) => [Math.cos((at * Math.PI) / 8), Math.sin((at * Math.PI) / 8)]),
  [[-1, 0.8], [0, -1], [1, 0.8]],
  [[0, -1.3], [1, 0], [0, 1.3], [-1, 0]],
  [[-1, -0.8], [1, -0.8], [0, 1]],
  [[-1, -0.3], [1, -0.3], [1, 0.3], [-1, 0.3]],
];

// Places of one side, in the order of the map, at [x, y] of the canvas: {place, x, y}.
const marksOf = (view, canvas, positions, order) => {
  const { left, width } = view.frame;
  const [first, last] = view.columns;
  const ids = positions.flat();
  const [low, high] = ids.reduce(([low, high], id) => [Math.min(low, id), Math.max(high, id)], [Infinity, -Infinity]);
  const height = canvas.clientHeight - 28;
  const down = (id) => 8 + (1 - (id - low) / (high - low || 1)) * (height - 16);
  const marks = [];
  for (let place = Math.floor(first); place < Math.min(order.length, Math.ceil(last)); place++) {
    const x = left + ((place + 0.5 - first) / (last - first)) * width;
    if (x < left || x > left + width) continue;
    for (const axis of positions) marks.push({ place, x, y: down(axis[order[place]]) });
  }
  return { marks, low, high, down, height };
};

const drawPositions = (view, canvas, { positions, roles }, order, colours) => {
  const context = sharp(canvas);
  const { left, width } = view.frame;
  const { marks, low, high, down, height } = marksOf(view, canvas, positions, order);
  const size = marks.length > 128 ? 2 : 4;
  context.save();
  context.globalAlpha = 0.2;
  const ticks = low === high ? [low] : ticksOf(low, high, 3);
  for (const tick of ticks) context.fillRect(left, down(tick) - 0.5, width, 1);
  context.restore();
  context.textAlign = "right";
  for (const tick of ticks) context.fillText(tick, left - 5, down(tick) + 4);
  context.textAlign = "center";
  context.fillText("position IDs of the tokens above", left + width / 2, height + 20);
  for (const { place, x, y } of marks) {
    const role = roles ? roles[order[place]] : 1;
    context.beginPath();
    for (const [across, below] of SHAPES[role]) context.lineTo(x + size * across, y + size * below);
    context.closePath();
    context.save();
    if (roles) context.fillStyle = colours[role];
    context.fill();
    context.restore();
    if (size > 2) context.stroke();
  }
};
