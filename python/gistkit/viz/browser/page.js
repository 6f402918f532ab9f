// Joins the controls, the text, the map and the position IDs of a page.

const page = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const { queries } = page;
const keys = page.keys ?? queries;
const same = page.keys === null;
const [rows, width] = [queries.labels.length, keys.labels.length];
const pool = pooling(page.shades, page.mean);
// What is shown: places in the list of maps, the chosen tokens [first, last], and the cells in their logical order.
const shown = { layer: page.opens, head: 0, chosen: null, direction: "rows", cells: null, moved: null, dark: false };
let rowOrder, columnOrder;

const view = new MatrixView(byId("matrix"), rows, width, () => { hideBox(); drawIds(); });

// --- values ---------------------------------------------------------------------------------------------------------

// The share of attention of a cell, or whether the key is seen, 0 or 1.
const valueOf = (cell) => (page.octave ? (cell ? 2 ** ((cell - 255) / page.octave) : 0) : cell ? 1 : 0);

// For each token of the text that is coloured: what the chosen ones give to it on average, or what it gives to them.
const valuesOfChosen = () => {
  const [first, last] = shown.chosen;
  const { cells } = shown;
  const count = last - first + 1;
  const values = new Array(shown.direction === "rows" ? width : rows).fill(0);
  for (let place = 0; place < values.length; place++) {
    for (let chosen = first; chosen <= last; chosen++) {
      values[place] += valueOf(cells[shown.direction === "rows" ? chosen * width + place : place * width + chosen]);
    }
    if (shown.direction === "rows" || !page.octave) values[place] /= count;
  }
  return values;
};

// The colour of a value, as that of a cell of the map; null where nothing is seen.
const colourOf = (value, role) => {
  if (!value) return null;
  const cell = page.octave
    ? Math.min(255, Math.max(1, Math.round(255 + page.octave * Math.log2(value))))
    : page.shades * (role ?? 0) + Math.max(1, Math.round(page.shades * value));
  return palette()[cell];
};

const palette = () => page.palettes[shown.dark ? "dark" : "light"];
const roleColours = () => page.role_colours[shown.dark ? "dark" : "light"];
const percent = (value) => `${Number((100 * value).toPrecision(2))} %`;
const weightOf = (cell) => {
  if (!page.octave) return cell ? "yes" : "no";
  if (cell < 2) return cell ? `below ${(2 ** ((1.5 - 255) / page.octave)).toExponential(1)}` : "0";
  const weight = valueOf(cell);
  return weight < 0.001 ? weight.toExponential(2) : weight.toPrecision(3);
};

// --- the text -------------------------------------------------------------------------------------------------------

const addStrip = (name, side, direction) => {
  const heading = Object.assign(document.createElement("p"), { className: "name", textContent: name });
  const strip = new TextStrip(name, side, (chosen) => {
    if (!same) shown.direction = direction;
    choose(chosen);
  });
  byId("strips").append(...(same ? [] : [heading]), strip.list);
  return strip;
};
const queryStrip = addStrip(same ? "Text" : "Tokens that look (queries)", queries, "rows");
const keyStrip = same ? queryStrip : addStrip("Tokens that are looked at (keys)", keys, "columns");
byId("text").style.setProperty("--strips", same ? 1 : 2);
byId("direction").hidden = !same;

const choose = (chosen) => {
  shown.chosen = chosen;
  showChosen();
};

const showChosen = () => {
  const { chosen, direction } = shown;
  const [from, to] = direction === "rows" ? [queryStrip, keyStrip] : [keyStrip, queryStrip];
  const target = direction === "rows" ? keys : queries;
  if (from !== to) to.mark(null);
  from.mark(chosen);
  from.colour(null);
  const values = chosen && shown.cells && valuesOfChosen();
  to.colour(values && values.map((value, place) => colourOf(value, target.roles?.[place])));
  byId("told").textContent = values ? tell(values, target) : "";
  byId("clear").disabled = !chosen;
  const isChosen = (order) => chosen && order.map((place) => chosen[0] <= place && place <= chosen[1]);
  view.chosen = { [direction]: isChosen(direction === "rows" ? rowOrder : columnOrder), colour: chosenColour() };
  view.draw();
};
const chosenColour = () => (shown.dark ? "#FF8AD0" : "#B3006B");

// What is to be seen of the chosen tokens, in words.
const tell = (values, target) => {
  const [first, last] = shown.chosen;
  const side = shown.direction === "rows" ? queries : keys;
  const who = first === last ? side.names[first] : `Tokens #${first} to #${last}`;
  const verb = first === last ? "s" : "";
  if (!page.octave) {
    const count = values.filter((value) => value > 0).length;
    return shown.direction === "rows"
      ? `${who} see${verb} ${count} of ${values.length} tokens.`
      : `${who} ${first === last ? "is" : "are"} seen by ${count} of ${values.length} tokens.`;
  }
  const most = Array.from(values.keys()).sort((a, b) => values[b] - values[a]).slice(0, 5);
  const list = most.filter((place) => values[place] > 0).map((place) => `${target.names[place]} ${percent(values[place])}`);
  if (!list.length) return shown.direction === "rows" ? `${who} look${verb} at nothing.` : `Nothing looks at ${who}.`;
  return shown.direction === "rows"
    ? `${who} look${verb} most at ${list.join(", ")}.`
    : `${who} ${first === last ? "is" : "are"} looked at most by ${list.join(", ")} of their attention.`;
};

// --- the map --------------------------------------------------------------------------------------------------------

const setOrder = () => {
  const physical = document.querySelector("[name=order]:checked").value === "physical";
  const orderOf = (side) => (physical ? side.physical : side.labels.map((_, place) => place));
  rowOrder = orderOf(queries);
  columnOrder = same ? rowOrder : orderOf(keys);
};

const arrangeMap = () => {
  shown.moved = arrange(shown.cells, rowOrder, columnOrder);
  view.copies = copiesOf(shown.moved, rows, width, pool);
  paintMap();
};

const paintMap = () => {
  for (const copy of view.copies) copy.canvas = paint(copy, palette());
  const strip = (side, order) => side.roles && runsOf(order.map((place) => roleColours()[side.roles[place]]));
  view.roles = { rows: strip(queries, rowOrder), columns: strip(keys, columnOrder) };
  showChosen();
  drawIds();
  drawBar();
};

const drawIds = () => {
  const canvas = byId("positions");
  canvas.hidden = !keys.positions;
  if (keys.positions && columnOrder) drawPositions(view, canvas, keys, columnOrder, roleColours());
};

// The colours of weights, with round numbers below.
const drawBar = () => {
  const ticks = Object.entries(page.ticks);
  if (!ticks.length) return;
  const levels = ticks.map(([, level]) => level);
  const [low, high] = [Math.min(...levels), Math.max(...levels)];
  const steps = Array.from({ length: 24 }, (_, at) => palette()[Math.round(low + ((high - low) * at) / 23)]);
  const ramp = document.createElement("i");
  ramp.style.background = `linear-gradient(to right, ${steps.join(",")})`;
  const names = ticks.map(([name, level]) => {
    const tick = Object.assign(document.createElement("span"), { textContent: name });
    tick.style.left = `${(100 * (level - low)) / (high - low)}%`;
    return tick;
  });
  byId("bar").replaceChildren(ramp, ...names);
};

// Unpacks the chosen map; when another one was chosen meanwhile, that one is shown instead.
const showMap = async () => {
  const at = shown.layer * page.heads.length + shown.head;
  byId("layer-name").textContent = page.layers[shown.layer];
  byId("head-name").textContent = page.heads[shown.head];
  try {
    const cells = await inflate(page.maps[at]);
    if (at !== shown.layer * page.heads.length + shown.head) return;
    shown.cells = cells;
    arrangeMap();
    byId("state").hidden = true;
  } catch (error) {
    byId("state").hidden = false;
    byId("state").textContent = `This browser could not draw the page: ${error}`;
    throw error;
  }
};

// --- the box beside the mouse ---------------------------------------------------------------------------------------

const hideBox = () => { byId("box").hidden = true; };

const showBox = (entries, { clientX, clientY }) => {
  const box = byId("box");
  box.replaceChildren(...entries.map(([name, text]) => {
    const row = document.createElement("tr");
    for (const [kind, content] of [["th", name], ["td", text]]) {
      row.append(Object.assign(document.createElement(kind), { textContent: content }));
    }
    return row;
  }));
  box.hidden = false;
  const fits = (at, size, room) => (at + 14 + size < room ? at + 14 : Math.max(8, at - 14 - size));
  const [x, y] = [fits(clientX, box.offsetWidth, innerWidth), fits(clientY, box.offsetHeight, innerHeight)];
  box.style.transform = `translate(${x}px, ${y}px)`;
};

const listenToMap = () => {
  const canvas = byId("matrix");
  let pressed = null;
  canvas.addEventListener("pointerdown", (event) => { pressed = [event.clientX, event.clientY]; });
  canvas.addEventListener("pointermove", (event) => {
    const place = view.at(event.offsetX, event.offsetY);
    if (!place || !shown.moved) return hideBox();
    const [row, column] = place;
    showBox([
      ["query", queries.labels[rowOrder[row]]], ["key", keys.labels[columnOrder[column]]],
      [page.octave ? "weight" : "seen", weightOf(shown.moved[row * width + column])],
    ], event);
  });
  canvas.addEventListener("pointerup", (event) => {
    const place = view.at(event.offsetX, event.offsetY);
    const near = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) < 4;
    pressed = null;
    if (!place || !near) return;
    if (!same) shown.direction = "rows";
    const chosen = shown.direction === "rows" ? rowOrder[place[0]] : columnOrder[place[1]];
    choose([chosen, chosen]);
  });
  byId("positions").addEventListener("pointermove", (event) => {
    const { marks } = marksOf(view, byId("positions"), keys.positions, columnOrder);
    const distance = ({ x, y }) => Math.hypot(x - event.offsetX, y - event.offsetY);
    const nearest = marks.reduce((best, mark) => (!best || distance(mark) < distance(best) ? mark : best), null);
    if (!nearest || distance(nearest) > 8) return hideBox();
    showBox([["key", keys.labels[columnOrder[nearest.place]]]], event);
  });
  for (const id of ["matrix", "positions"]) byId(id).addEventListener("pointerleave", hideBox);
  addEventListener("scroll", hideBox, true);
};

// --- the controls ---------------------------------------------------------------------------------------------------

for (const [name, names] of [["layer", page.layers], ["head", page.heads]]) {
  byId(`${name}-control`).hidden = names.length < 2;
  byId(name).max = names.length - 1;
  byId(name).value = shown[name];
  byId(name).addEventListener("input", () => {
    shown[name] = Number(byId(name).value);
    byId(name).setAttribute("aria-valuetext", names[shown[name]]);
    showMap();
  });
}

byId("order").hidden = !(queries.physical && keys.physical)
  || [queries, keys].every(({ physical }) => physical.every((place, at) => place === at));
byId("order").addEventListener("change", () => { setOrder(); arrangeMap(); });
byId("direction").addEventListener("change", () => {
  shown.direction = document.querySelector("[name=direction]:checked").value;
  showChosen();
});
byId("clear").addEventListener("click", () => choose(null));
byId("closer").addEventListener("click", () => view.zoom(0.5));
byId("farther").addEventListener("click", () => view.zoom(2));
byId("whole").addEventListener("click", () => view.show(1, [0, 0]));

const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => {
  const theme = document.querySelector("[name=theme]:checked").value;
  shown.dark = theme === "dark" || (theme === "system" && darkSystem.matches);
  if (shown.cells) paintMap();
};
darkSystem.addEventListener("change", setTheme);
for (const radio of document.querySelectorAll("[name=theme]")) radio.addEventListener("change", setTheme);

listenToMap();
setOrder();
setTheme();
showMap();
