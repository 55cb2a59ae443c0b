// Descriptions of what to show, and what makes the document equal to them.
//
// html`<p class=${tone}>${words}</p>` returns a description: nothing of it is parsed as HTML, so words of the
// network stay words. `<${Name} of=${value} />` is a component: a function of its attributes that returns a
// description, and may keep state by the hooks below. An element stays in the document while its place in the
// template, or its `key`, stays: so focus, typed text and scrolling survive when the page is drawn again.

const SLOT = "\0"; // where a value stands
const TAG = /<(\/?)([^\s/>]+)((?:"[^"]*"|[^">])*?)(\/?)>/g;
const ATTRIBUTE = /([^\s=]+)(?:=(?:"([^"]*)"|([^\s"]+)))?/g;
const LINE_BREAK = /^\s*\n\s*|\s*\n\s*$/g; // at either end of a text: between tags it is no space
const parsed = new WeakMap();

// A class, so that no object of the network is taken for one.
class Description {
  constructor(type) {
    Object.assign(this, { type, key: undefined, attributes: {}, children: [] });
  }
}

export function html(strings, ...values) {
  if (!parsed.has(strings)) parsed.set(strings, parse(strings));
  const made = parsed.get(strings).map((part) => fill(part, values));
  return made.length === 1 ? made[0] : made;
}

function parse(strings) {
  const source = strings.join(SLOT);
  const open = [{ children: [] }];
  let slots = 0;
  let end = 0;
  const orSlot = (text) => (text === SLOT ? { slot: slots++ } : text);
  const add = (part) => open.at(-1).children.push(part);
  const addText = (text) => {
    for (const [place, piece] of text.split(SLOT).entries()) {
      if (place) add(orSlot(SLOT));
      const words = piece.replace(LINE_BREAK, "");
      if (words) add(words);
    }
  };
  for (const { 0: all, 1: closing, 2: name, 3: attributes, 4: single, index } of source.matchAll(TAG)) {
    addText(source.slice(end, index));
    end = index + all.length;
    if (closing) {
      open.pop();
      continue;
    }
    const part = { type: orSlot(name), attributes: [], children: [] };
    for (const [, key, quoted, bare] of attributes.matchAll(ATTRIBUTE)) part.attributes.push([key, orSlot(quoted ?? bare ?? true)]);
    add(part);
    if (!single) open.push(part);
  }
  addText(source.slice(end));
  return open[0].children;
}

function fill(part, values) {
  const valueOf = (some) => (some.slot === undefined ? some : values[some.slot]);
  if (!part.attributes) return valueOf(part);
  const made = new Description(valueOf(part.type));
  for (const [name, some] of part.attributes) (name === "key" ? made : made.attributes)[name] = valueOf(some);
  for (const child of part.children) made.children.push(fill(child, values));
  return made;
}

// The document ------------------------------------------------------------------------------------

const TEXT = "";
const SVG = "http://www.w3.org/2000/svg";

// Draw a description in an element that nobody else writes to.
export function render(wanted, element) {
  const root = { dom: element, depth: 0 };
  root.children = patch([], wanted, root);
  place(root);
  finish();
}

// Each part by its key, or by where it stands among its siblings; what shows nothing leaves its place empty.
function listed(wanted, prefix, found) {
  wanted.forEach((some, place) => {
    if (Array.isArray(some)) listed(some, `${prefix}${place}.`, found);
    else if (some !== null && some !== undefined && typeof some !== "boolean" && some !== "") {
      found.push([prefix + (some.key === undefined ? place : `=${some.key}`), some]);
    }
  });
  return found;
}

function patch(before, wanted, parent) {
  const old = new Map(before.map((node) => [node.id, node]));
  const nodes = listed([wanted], "", []).map(([id, some]) => {
    const type = some instanceof Description ? some.type : TEXT;
    let node = old.get(id);
    if (node && node.type === type) old.delete(id);
    else node = create(type, id, parent);
    update(node, some);
    return node;
  });
  old.forEach(unmount);
  return nodes;
}

function create(type, id, parent) {
  const node = { type, id, parent, depth: parent.depth + 1, svg: parent.svg || type === "svg", attributes: {}, children: [] };
  if (typeof type === "function") node.hooks = [];
  else if (type === TEXT) node.dom = document.createTextNode("");
  else {
    node.dom = node.svg ? document.createElementNS(SVG, type) : document.createElement(type);
    node.listeners = {};
    node.handleEvent = (event) => node.listeners[event.type]?.(event);
  }
  return node;
}

function update(node, wanted) {
  if (node.type === TEXT) {
    if (node.dom.data !== String(wanted)) node.dom.data = wanted;
  } else if (node.hooks) {
    node.attributes = wanted.attributes;
    draw(node);
  } else {
    node.children = patch(node.children, wanted.children, node);
    place(node);
    setAttributes(node, wanted.attributes); // after the children: a select's value is one of its options
  }
}

function setAttributes(node, attributes) {
  const before = node.attributes;
  node.attributes = attributes;
  for (const name in attributes) setAttribute(node, name, attributes[name], before[name]);
  for (const name in before) if (!(name in attributes)) setAttribute(node, name, null, before[name]);
}

function setAttribute(node, name, value, before) {
  const { dom } = node;
  if (name === "value") {
    if (dom.value !== String(value)) dom.value = value; // not of equal ones: the caret would move
  } else if (name === "style") setStyle(dom.style, before || {}, value || {});
  else if (value === before) return;
  else if (name === "ref") value.current = dom;
  else if (name.startsWith("on")) {
    const type = name.slice(2).toLowerCase();
    node.listeners[type] = value;
    if (!before) dom.addEventListener(type, node);
  } else if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) dom.removeAttribute(name);
  else dom.setAttribute(name, value);
}

function setStyle(style, before, wanted) {
  for (const name in { ...before, ...wanted }) {
    if (wanted[name] === before[name]) continue;
    if (name.startsWith("--")) style.setProperty(name, wanted[name] ?? "");
    else style[name] = wanted[name] ?? "";
  }
}

const elementsOf = (node) => (node.dom ? [node.dom] : node.children.flatMap(elementsOf));

// Have an element's children stand in their order, and no others. What has the focus is not moved: it would lose it.
function place(node) {
  const { dom } = node;
  const wanted = node.children.flatMap(elementsOf);
  let same = dom.firstChild;
  for (const element of wanted) {
    if (element !== same) break;
    same = same.nextSibling;
  }
  if (!same && dom.lastChild === (wanted.at(-1) ?? null)) return; // as nearly always
  const stays = new Set(wanted);
  for (const child of [...dom.childNodes]) if (!stays.has(child)) child.remove();
  if (!wanted.length) return;
  let focused = document.activeElement;
  while (focused && focused.parentNode !== dom) focused = focused.parentNode;
  const start = Math.max(0, wanted.indexOf(focused));
  if (wanted[start].parentNode !== dom) dom.prepend(wanted[start]);
  for (let at = start - 1; at >= 0; at--) if (wanted[at].nextSibling !== wanted[at + 1]) wanted[at + 1].before(wanted[at]);
  for (let at = start + 1; at < wanted.length; at++) if (wanted[at - 1].nextSibling !== wanted[at]) wanted[at - 1].after(wanted[at]);
}

// The elements of it go when its parent's children are placed.
function unmount(node) {
  node.gone = true;
  for (const { leave } of node.hooks || []) leave?.();
  node.children.forEach(unmount);
}

// Components --------------------------------------------------------------------------------------

let drawing = null; // whose function runs,
let hooked = 0; // and how many hooks it has called
const stale = new Set();
const layoutEffects = [];
const effects = [];

function draw(node) {
  stale.delete(node);
  try {
    node.children = patch(node.children, run(node), node);
  } catch (error) {
    if (!node.caught) throw error;
    node.children.forEach(unmount); // perhaps half drawn
    node.caught(error);
    stale.delete(node);
    node.children = patch([], run(node), node);
  }
}

function run(node) {
  const outer = [drawing, hooked];
  [drawing, hooked] = [node, 0];
  try {
    return node.type(node.attributes);
  } finally {
    [drawing, hooked] = outer;
  }
}

function redraw(node) {
  if (!stale.size) queueMicrotask(drawStale);
  stale.add(node);
}

function drawStale() {
  runAll(effects);
  while (stale.size) {
    const node = [...stale].reduce((one, other) => (other.depth < one.depth ? other : one)); // parents first
    stale.delete(node);
    if (node.gone) continue;
    let host = node.parent;
    try {
      draw(node);
      while (!host.dom) host = host.parent;
      place(host);
    } catch (error) {
      while (host && !host.caught) host = host.parent;
      if (host) host.caught(error);
      else reportError(error);
    }
  }
  finish();
}

function finish() {
  runAll(layoutEffects);
  setTimeout(runAll, 0, effects);
}

function runAll(queue) {
  for (const { node, hook, enter } of queue.splice(0)) {
    if (node.gone) continue;
    try {
      hook.leave?.();
      const leave = enter();
      hook.leave = typeof leave === "function" ? leave : null;
    } catch (error) {
      reportError(error);
    }
  }
}

// Hooks: what a component keeps between two drawings; called always in the same order ---------------

const nextHook = (make) => (drawing.hooks[hooked++] ??= make());
const differ = (before, now) => !before || !now || now.some((some, place) => !Object.is(some, before[place]));

export function useState(initial) {
  const node = drawing;
  const hook = nextHook(() => {
    const made = { value: typeof initial === "function" ? initial() : initial };
    made.set = (next) => {
      const value = typeof next === "function" ? next(made.value) : next;
      if (Object.is(value, made.value)) return;
      made.value = value;
      redraw(node);
    };
    return made;
  });
  return [hook.value, hook.set];
}

export const useRef = (initial) => nextHook(() => ({ current: initial }));

export function useMemo(make, inputs) {
  const hook = nextHook(() => ({}));
  if (differ(hook.inputs, inputs)) Object.assign(hook, { value: make(), inputs });
  return hook.value;
}

function useEffectIn(queue, enter, inputs) {
  const hook = nextHook(() => ({}));
  if (differ(hook.inputs, inputs)) queue.push({ node: drawing, hook, enter });
  hook.inputs = inputs;
}

// Run after the page was drawn, and, if it returns a function, that before the next time and at the end.
export const useEffect = (enter, inputs) => useEffectIn(effects, enter, inputs);

// The same before the browser shows it.
export const useLayoutEffect = (enter, inputs) => useEffectIn(layoutEffects, enter, inputs);

// The error of a component within this one, or null; and what forgets it.
export function useErrorBoundary() {
  const [error, setError] = useState(null);
  drawing.caught = setError;
  return [error, () => setError(null)];
}
