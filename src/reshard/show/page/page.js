"use strict";
// One page: light up what belongs together, list and search tensors; the explorer adds a form.
// All text from the data goes through textContent: tensor names are not trusted.
(() => {
  const root = document.querySelector(".rs.page");
  const MAX_SAID = 6;
  let page = null;

  // Lighting: pieces of the two pictures of a move, and entries of the matrix.

  class Lights {
    constructor(data) {
      this.data = data;
      this.pieces = new Map();
      this.entries = [];
      this.titles = new Map();
      this.pinned = null;
      this.lit = [];
      root.querySelectorAll("svg.picture").forEach((picture) => picture.setAttribute("tabindex", "0"));
      for (const node of root.querySelectorAll(".piece, .entry")) {
        const title = node.querySelector("title");
        if (title) { this.titles.set(node, title.textContent); title.remove(); }
        if (node.matches(".entry")) this.entries[+node.dataset.entry] = node;
        else this.pieces.set(key(node.dataset.move, node.dataset.side, node.dataset.number), node);
      }
    }

    links(move) { return (this.data.moves[move] || { links: [] }).links; }

    show(node) {
      this.clear();
      if (node.matches(".entry")) this.showEntry(node); else this.showPiece(node);
      node.classList.add("here", "lit");
      this.lit.push(node);
      root.classList.add("pointing");
    }

    showPiece(node) {
      const { move, side, number } = node.dataset;
      const others = new Set(), entries = new Set();
      for (const [have, want, some] of this.links(move)) {
        if ((side === "0" ? have : want) !== +number) continue;
        others.add(side === "0" ? want : have);
        some.forEach((one) => entries.add(one));
      }
      const nodes = [...others].map((one) => this.pieces.get(key(move, side === "0" ? 1 : 0, one)));
      this.light(nodes);
      this.light([...entries].map((one) => this.entries[one]));
      this.say(node, this.aboutPiece(node, nodes, [...entries].sort((a, b) => a - b)));
    }

    showEntry(node) {
      const number = +node.dataset.entry;
      const nodes = new Set();
      this.data.moves.forEach((_, move) => {
        for (const [have, want, some] of this.links(move)) {
          if (!some.includes(number)) continue;
          nodes.add(this.pieces.get(key(move, 0, have)));
          nodes.add(this.pieces.get(key(move, 1, want)));
        }
      });
      this.light([...nodes]);
      this.say(node, [this.titles.get(node)]);
    }

    light(nodes) {
      for (const node of nodes) {
        if (!node) continue;
        node.classList.add("lit");
        this.lit.push(node);
      }
    }

    aboutPiece(node, others, entries) {
      const parts = [this.titles.get(node)];
      if (!this.data.matrix) return parts;
      const ranks = [...new Set(others.filter(Boolean).map((one) => one.dataset.ranks).filter(Boolean))];
      const verb = node.dataset.side === "0" ? "goes to" : "comes from";
      const one = ranks.length === 1 && /^\d+$/.test(ranks[0]);
      if (ranks.length) parts.push(`${verb} rank${one ? "" : "s"} ${some(ranks, " · ")}`);
      if (!ranks.length) parts.push(node.dataset.side === "0" ? "is not wanted" : "becomes zeros");
      else if (entries.length) parts.push(`travels ${some(entries.map((one) => this.pair(one)), ", ")}`);
      else parts.push("does not travel: it is already there");
      return parts;
    }

    pair(entry) {
      const { sources, destinations } = this.data.matrix;
      return `${sources[Math.floor(entry / destinations.length)]}\u00a0→\u00a0${destinations[entry % destinations.length]}`;
    }

    say(node, parts) {
      const place = (node.closest(".move") || node.closest(".traffic") || root).querySelector(".info");
      if (!place) return;
      const strong = document.createElement("b");
      strong.textContent = parts[0];
      place.replaceChildren(strong, parts.slice(1).map((part) => `; ${part}`).join(""));
    }

    clear() {
      this.lit.forEach((node) => node.classList.remove("lit", "here"));
      this.lit = [];
      root.classList.remove("pointing");
      root.querySelectorAll(".info").forEach((info) => info.replaceChildren());
    }

    // With the keyboard: the arrows go from piece to piece of the picture that has the focus.
    step(picture, by) {
      const pieces = [...picture.querySelectorAll(".piece")];
      const at = pieces.indexOf(this.pinned);
      const next = pieces[at < 0 ? (by > 0 ? 0 : pieces.length - 1) : at + by];
      if (next) this.pin(next);
    }

    point(node) { if (!this.pinned && node) this.show(node); }
    leave() { if (!this.pinned) this.clear(); }
    pin(node) {
      const again = this.pinned === node;
      this.pinned = null;
      this.clear();
      if (node && !again) { this.show(node); this.pinned = node; }
    }
  }

  const key = (move, side, number) => `${move}/${side}/${number}`;
  const some = (items, between) =>
    items.slice(0, MAX_SAID).join(between) + (items.length > MAX_SAID ? ` and ${items.length - MAX_SAID} more` : "");
  const target = (event) => event.target.closest && event.target.closest(".piece, .entry:not(.empty)");

  root.addEventListener("pointerover", (event) => {
    if (event.pointerType !== "touch" && page) page.lights.point(target(event));
  });
  root.addEventListener("pointerout", (event) => {
    if (event.pointerType !== "touch" && page && target(event)) page.lights.leave();
  });
  root.addEventListener("click", (event) => {
    if (!page) return;
    const node = target(event);
    if (node || page.lights.pinned) page.lights.pin(node);
  });
  document.addEventListener("keydown", (event) => {
    if (!page) return;
    if (event.key === "Escape") page.lights.pin(null);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const picture = step && event.target.closest && event.target.closest("svg.picture");
    if (picture) { event.preventDefault(); page.lights.step(picture, step); }
  });

  // The list: only the rows in view are in the document, however many tensors there are.

  const GROUP = { name: 0, shape: 1, dtype: 2, from: 3, to: 4, size: 5, bytes: 6, wireText: 7, wire: 8, rounds: 9, move: 10, count: 11, drawn: 12 };

  class List {
    constructor(node, data) {
      this.node = node;
      this.data = data;
      this.view = "groups";
      this.sort = { by: "bytes", down: true };
      this.rows = node.querySelector(".rows");
      this.space = node.querySelector(".space");
      this.shown = new Map();
      this.chosen = null;
      this.words = [];
      node.hidden = false;
      node.querySelector(".search").addEventListener("input", (event) => this.search(event.target.value));
      node.querySelectorAll("[data-view]").forEach((button) => button.addEventListener("click", () => this.setView(button.dataset.view)));
      node.querySelectorAll("[data-sort]").forEach((button) => button.addEventListener("click", () => this.setSort(button.dataset.sort)));
      this.rows.addEventListener("scroll", () => this.draw(), { passive: true });
      this.rows.addEventListener("click", (event) => this.choose(event.target.closest(".row")));
      this.measure();
      new ResizeObserver(() => { this.measure(); this.draw(true); }).observe(node);
      this.setView("groups");
    }

    measure() {
      this.narrow = this.node.clientWidth < 640;
      this.node.classList.toggle("narrow", this.narrow);
      this.height = this.narrow ? 78 : 42;
      this.top = this.narrow ? 0 : 34; // the line of headings
    }

    setView(view) {
      this.view = view;
      this.node.querySelectorAll("[data-view]").forEach((one) => one.setAttribute("aria-pressed", one.dataset.view === view));
      this.filter();
    }

    setSort(by) {
      this.sort = { by, down: this.sort.by === by ? !this.sort.down : by !== "name" };
      this.node.querySelectorAll("[data-sort]").forEach((one) => one.setAttribute("aria-pressed", one.dataset.sort === by));
      this.filter();
    }

    search(text) {
      this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
      if (this.words.length && this.view === "groups") this.setView("tensors"); else this.filter();
    }

    all() {
      if (this.view === "groups") return this.data.groups.map((_, group) => [group, -1]);
      return this.items ||= this.data.names.flatMap((names, group) => names.map((_, at) => [group, at]));
    }

    about(group) {
      this.texts ||= this.data.groups.map((one) => one.slice(1, 5).join(" ").toLowerCase());
      return this.texts[group];
    }

    name([group, at]) { return at < 0 ? this.data.groups[group][GROUP.name] : this.data.names[group][at]; }

    filter() {
      const wanted = (item) => {
        const name = this.name(item).toLowerCase();
        return this.words.every((word) => name.includes(word) || this.about(item[0]).includes(word));
      };
      const items = this.words.length ? this.all().filter(wanted) : [...this.all()];
      const { by, down } = this.sort;
      const value = by === "name" ? null : ([group, at]) => this.data.groups[group][GROUP[by]] / (at < 0 ? 1 : this.data.groups[group][GROUP.count]);
      items.sort((a, b) => (value ? value(b) - value(a) : 0) || compare(this.name(a), this.name(b)));
      if (value ? !down : down) items.reverse();
      this.items_shown = items;
      const total = this.all().length;
      const what = this.view === "groups" ? "group" : "tensor";
      const count = items.length === total ? `${total.toLocaleString("en")}` : `${items.length.toLocaleString("en")} of ${total.toLocaleString("en")}`;
      this.node.querySelector(".count").textContent = `${count} ${what}${total === 1 ? "" : "s"}`;
      this.rows.scrollTop = 0;
      this.draw(true);
    }

    draw(anew) {
      const items = this.items_shown || [];
      this.space.style.height = `${items.length * this.height}px`;
      this.rows.style.height = `${Math.min(Math.max(items.length, 1) * this.height + this.top + 2, 420)}px`;
      if (anew) { this.shown.forEach((row) => row.remove()); this.shown.clear(); }
      const first = Math.max(Math.floor(this.rows.scrollTop / this.height) - 6, 0);
      const last = Math.min(first + Math.ceil(420 / this.height) + 12, items.length);
      for (const [at, row] of this.shown) if (at < first || at >= last) { row.remove(); this.shown.delete(at); }
      for (let at = first; at < last; at++) {
        if (this.shown.has(at)) continue;
        const row = this.row(items[at]);
        row.style.top = `${at * this.height}px`;
        row.style.height = `${this.height}px`;
        this.space.append(row);
        this.shown.set(at, row);
      }
    }

    row(item) {
      const group = this.data.groups[item[0]];
      const alone = item[1] >= 0;
      const row = element("div", "row");
      row.role = "listitem";
      row.dataset.group = item[0];
      if (this.chosen === this.name(item)) row.classList.add("chosen");
      const name = element("code", "name");
      const full = this.name(item);
      name.title = full;
      this.mark(name, full);
      const size = alone ? bytes(group[GROUP.bytes] / group[GROUP.count]) : group[GROUP.size];
      const wire = alone ? bytes(group[GROUP.wire] / group[GROUP.count]) : group[GROUP.wireText];
      const shape = `${group[GROUP.shape]} ${group[GROUP.dtype]}`;
      if (this.narrow) {
        const way = this.data.stored ? group[GROUP.from] : `${group[GROUP.from]} → ${group[GROUP.to]}`;
        row.append(name, element("div", "meta", `${shape}, ${size}`), element("div", "meta", way));
        return row;
      }
      row.append(name, element("span", "", shape), element("code", "", group[GROUP.from]));
      if (this.data.stored) { row.append(element("span", "number", size)); return row; }
      row.append(element("code", "", group[GROUP.to]), element("span", "number", size), element("span", "number", wire), element("span", "number", group[GROUP.rounds]));
      return row;
    }

    mark(node, text) {
      const word = this.words.find((one) => text.toLowerCase().includes(one));
      const at = word === undefined ? -1 : text.toLowerCase().indexOf(word);
      if (at < 0) { node.textContent = text; return; }
      node.append(text.slice(0, at), element("mark", "", text.slice(at, at + word.length)), text.slice(at + word.length));
    }

    // The picture is of one group; others of its kind differ only in which ranks hold them.
    tell(move, group) {
      root.querySelectorAll(".kin").forEach((note) => note.remove());
      const way = this.data.stored ? group[GROUP.from] : `${group[GROUP.from]} → ${group[GROUP.to]}`;
      const what = group[GROUP.drawn] ? " is drawn here" : ` is like this, on other ranks: ${way}`;
      const note = element("p", "note kin");
      note.append(element("b", "", this.chosen), what);
      move.querySelector("h3").after(note);
    }

    choose(row) {
      if (!row) return;
      const group = this.data.groups[+row.dataset.group];
      this.chosen = row.querySelector(".name").title;
      this.draw(true);
      const move = document.getElementById(`move-${group[GROUP.move]}`);
      if (!move) return;
      const closed = move.closest("details");
      if (closed) closed.open = true;
      this.tell(move, group);
      move.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    }
  }

  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  function element(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function bytes(amount) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (amount < 1024) return unit === "B" ? `${Math.round(amount)} B` : `${amount.toFixed(1)} ${unit}`;
      amount /= 1024;
    }
    return `${amount.toFixed(1)} TiB`;
  }

  function begin(data) {
    const list = root.querySelector(".list");
    page = { data, lights: new Lights(data), list: list && new List(list, data) };
  }

  begin(JSON.parse(document.getElementById("data").textContent));
  root.dataset.ready = "yes";

  // The explorer: fields are sent to the server on this machine, which answers with the document.

  const form = root.querySelector("form");
  if (!form) return;
  let number = 0, waiting = null;

  const values = () => Object.fromEntries(new FormData(form));

  async function ask(turn) {
    const response = await fetch("/plan", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values()),
    });
    const answer = await response.json();
    if (turn !== number) return;
    complain(answer.errors || {});
    if (answer.html === undefined) return;
    const doc = document.getElementById("doc");
    doc.innerHTML = answer.html; // made by our own server, which escapes what was typed
    doc.classList.remove("stale");
    document.title = answer.title;
    history.replaceState(null, "", `#${new URLSearchParams(values())}`);
    begin(answer.data);
  }

  function complain(errors) {
    form.querySelectorAll("[data-field]").forEach((label) => {
      const text = errors[label.dataset.field] || "";
      label.classList.toggle("wrong", Boolean(text));
      label.querySelector(".error").textContent = text;
    });
    form.querySelector(".general").textContent = errors.general || "";
    document.getElementById("doc").classList.toggle("stale", Object.keys(errors).length > 0);
    form.dataset.answered = number;
  }

  const send = () => {
    const turn = ++number;
    ask(turn).catch(() => {
      if (turn === number) complain({ general: "The server does not answer: it has ended, or the plan takes too long. Start reshard explore again." });
    });
  };
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(send, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(waiting); send(); });

  const given = new URLSearchParams(location.hash.slice(1));
  let changed = false;
  for (const [name, value] of given) {
    const field = form.elements.namedItem(name);
    if (field && field.value !== value) { field.value = value; changed = true; }
  }
  if (changed) send();
})();
