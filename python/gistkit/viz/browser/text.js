// A text as a list of tokens to choose from: by a click, by dragging over several, or by the arrow keys.

class TextStrip {
  // `choose` is called with the first and the last chosen token, or with null.
  constructor(name, { texts, labels, roles }, choose) {
    this.choose = choose;
    this.list = Object.assign(document.createElement("div"), { className: "strip", role: "listbox" });
    this.list.setAttribute("aria-label", name);
    this.list.setAttribute("aria-multiselectable", "true");
    this.list.classList.toggle("numbers", !texts);
    this.tokens = labels.map((label, place) => {
      const token = document.createElement("span");
      token.textContent = texts ? texts[place] : place;
      token.role = "option";
      token.tabIndex = place ? -1 : 0;
      token.setAttribute("aria-label", label);
      if (roles) token.style.borderBottomColor = `var(--role${roles[place]})`;
      this.list.append(token, ...(texts?.[place].endsWith("↵") ? [document.createElement("br")] : []));
      return token;
    });
    this.places = new Map(this.tokens.map((token, place) => [token, place]));
    this.anchor = this.current = 0;
    this.#listen();
  }

  // Marks the tokens from first to last as chosen; null: none.
  mark(chosen) {
    for (const [place, token] of this.tokens.entries()) {
      token.ariaSelected = String(chosen !== null && chosen[0] <= place && place <= chosen[1]);
    }
  }

  // Gives each token a colour, "#RRGGBB", or null; its text is black or white, whichever is easier to read.
  colour(colours) {
    for (const [place, { style }] of this.tokens.entries()) {
      style.background = colours?.[place] ?? "";
      style.color = colours?.[place] ? inkOn(colours[place]) : "";
    }
  }

  #pick(place, extend) {
    this.tokens[this.current].tabIndex = -1;
    this.current = place;
    if (!extend) this.anchor = place;
    this.tokens[place].tabIndex = 0;
    this.tokens[place].focus();
    this.choose([Math.min(this.anchor, place), Math.max(this.anchor, place)]);
  }

  // The token one line up or down, as nearly above or below as there is one.
  #beside(direction) {
    const middle = (token) => token.offsetLeft + token.offsetWidth / 2;
    const start = this.tokens[this.current];
    let [best, line] = [this.current, null];
    for (let at = this.current + direction; this.tokens[at]; at += direction) {
      const token = this.tokens[at];
      if (token.offsetTop === start.offsetTop) continue;
      line ??= token.offsetTop;
      if (token.offsetTop !== line) break;
      const distance = (token) => Math.abs(middle(token) - middle(start));
      if (best === this.current || distance(token) < distance(this.tokens[best])) best = at;
    }
    return best;
  }

  #listen() {
    let dragged = false;
    const placeAt = (event) => this.places.get(document.elementFromPoint(event.clientX, event.clientY));
    this.list.addEventListener("pointerdown", (event) => {
      const place = placeAt(event);
      if (place === undefined || event.button) return;
      event.preventDefault();
      dragged = true;
      this.#pick(place, event.shiftKey);
    });
    this.list.addEventListener("pointermove", (event) => {
      const place = placeAt(event);
      if (dragged && event.buttons && place !== undefined && place !== this.current) this.#pick(place, true);
    });
    addEventListener("pointerup", () => { dragged = false; });
    this.list.addEventListener("keydown", (event) => {
      const last = this.tokens.length - 1;
      const to = {
        ArrowLeft: () => this.current - 1, ArrowRight: () => this.current + 1, ArrowUp: () => this.#beside(-1),
        ArrowDown: () => this.#beside(1), Home: () => 0, End: () => last, Enter: () => this.current,
        " ": () => this.current,
      }[event.key];
      if (event.key === "Escape") this.choose(null);
      if (!to) return;
      event.preventDefault();
      this.#pick(Math.min(last, Math.max(0, to())), event.shiftKey);
    });
  }
}

// The luminance of a colour, as in the Web Content Accessibility Guidelines.
const luminance = (colour) => {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};

// Black or white: one of them has a contrast of at least 4.58 to any colour.
const inkOn = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#FFFFFF");
