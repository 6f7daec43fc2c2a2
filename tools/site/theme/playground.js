// "Try it here" on the start page: its examples become fields that PostgreSQL runs in the browser (PGlite, with the
// portable edition). A click loads it, from the directory pglite of this site; nothing comes from other hosts.

'use strict';

const pglite = new URL('pglite/', document.currentScript.src);
const watched = {
  key: 'SELECT scope, key, status, response FROM idempotency.key ORDER BY created_at',
  card_charge: 'SELECT * FROM card_charge ORDER BY id',
  outbox: 'SELECT aggregatetype AS topic, payload FROM idempotency.outbox ORDER BY seq',
};
// Values as PostgreSQL sends them: a stored answer is the same byte for byte.
const asSent = (value) => value;
const options = { rowMode: 'array', parsers: Object.fromEntries([16, 114, 1184, 3802].map((type) => [type, asSent])) };

let db;
let loaded; // a promise
let before = {}; // the rows after the last step, as text, by table
let last = Promise.resolve(); // steps run one after the other

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// The statements of a script, which psql, too, sends one by one. Strings, bodies and comments can contain semicolons.
function statements(script) {
  const found = script.match(/(?:'(?:[^']|'')*'|"[^"]*"|(\$\w*\$)[\s\S]*?\1|--.*|\/\*[\s\S]*?\*\/|[^;])+;?/g) || [];
  return found.filter((statement) => statement.replace(/--.*/g, '').trim());
}

// Static servers do not compress such files, so they are stored compressed.
async function unpacked(name, type = '') {
  const response = await fetch(new URL(`${name}.gzip`, pglite));
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  return new Response(response.body.pipeThrough(new DecompressionStream('gzip')), { headers: { 'Content-Type': type } });
}

async function load() {
  const compiled = (name) => WebAssembly.compileStreaming(unpacked(name, 'application/wasm'));
  const [{ PGlite }, pgliteWasmModule, initdbWasmModule, data, edition] = await Promise.all([import(new URL('index.js', pglite)),
    compiled('pglite.wasm'), compiled('initdb.wasm'), unpacked('pglite.data'), unpacked('idempotency.sql')]);
  const [fsBundle, script] = await Promise.all([data.blob(), edition.text()]);
  return { create: () => PGlite.create({ pgliteWasmModule, initdbWasmModule, fsBundle }), script };
}

async function restart() {
  const { create, script } = await (loaded ??= load());
  await db?.close();
  db = await create();
  before = {};
  await db.exec(script);
}

function table({ fields, rows }, isNew = () => false) {
  const cells = (tag, values) => values.map((value) => make(tag, {}, String(value ?? '')));
  return make('div', { className: 'table', tabIndex: 0 }, make('table', {},
    make('thead', {}, make('tr', {}, ...cells('th', fields.map(({ name }) => name)))),
    make('tbody', {}, ...rows.map((row) => make('tr', { className: isNew(row) ? 'new' : '' }, ...cells('td', row))))));
}

function refusal({ code, message, detail, hint }) {
  const more = [detail && `DETAIL:  ${detail}`, hint && `HINT:  ${hint}`].filter(Boolean);
  return make('div', { className: 'refused' }, make('p', {}, make('strong', {}, `ERROR:  ${code ?? ''}`), `: ${message}`),
    ...more.map((line) => make('p', {}, line)));
}

// The rows of a table; those that the step has added are marked.
async function rowsOf(name) {
  const figure = (caption, content) => make('figure', {}, make('figcaption', {}, make('code', {}, name), caption), content);
  try {
    const [found] = await db.exec(watched[name], options);
    const known = new Set(before[name]);
    before[name] = found.rows.map(String);
    const added = before[name].filter((row) => !known.has(row)).length;
    return figure(` ${found.rows.length} ${found.rows.length === 1 ? 'row' : 'rows'}${added ? `, ${added} new` : ''}`,
      table(found, (row) => !known.has(String(row))));
  } catch (error) { // an edited statement has dropped it
    return figure('', refusal(error));
  }
}

async function run(script, isFirst) {
  if (isFirst) await restart();
  let shown = [];
  try {
    for (const statement of statements(script)) {
      for (const result of await db.exec(statement, options)) shown.push(result.fields.length ? table(result) : make('code', {}, result.command));
    }
    if (isFirst) shown = []; // of no interest
  } catch (error) {
    shown.push(refusal(error));
  }
  await db.exec('ROLLBACK'); // what the step has left open
  const rows = make('div', { className: 'rows' });
  for (const name of Object.keys(watched)) rows.append(await rowsOf(name));
  return [...shown, rows];
}

// Replaces an example and its output by a field with buttons. The first one begins with a new database.
function makeStep(pre, title, isFirst) {
  const original = pre.textContent.replace(/^CREATE EXTENSION.*\n/, '').trimEnd(); // load() has the edition
  const field = make('textarea', { value: original, spellcheck: false, ariaLabel: `SQL: ${title}` });
  const named = (text, properties) => make('button', { type: 'button', ariaLabel: `${text}: ${title}`, ...properties }, text);
  const button = named(isFirst ? 'Start again' : 'Run', { className: 'run', title: 'Ctrl+Enter' });
  const undo = named('Undo edits');
  const output = make('div', { className: 'output', role: 'status' });
  const edited = () => {
    field.rows = field.value.split('\n').length;
    undo.hidden = field.value === original;
  };
  const start = () => {
    output.ariaBusy = 'true';
    last = last.then(() => run(field.value, isFirst)).catch((error) => [refusal(error)]).then((shown) => {
      output.replaceChildren(...shown);
      output.ariaBusy = 'false';
    });
    return last;
  };

  edited();
  field.addEventListener('input', edited);
  field.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) start();
  });
  button.addEventListener('click', start);
  undo.addEventListener('click', () => {
    field.value = original;
    edited();
    field.focus();
  });
  if (pre.nextElementSibling?.matches('pre')) pre.nextElementSibling.remove();
  pre.replaceWith(make('div', { className: 'step' }, field, make('div', { className: 'buttons' }, button, undo), output));
  return start;
}

// The section: a button first, and after the click the steps.
const intro = document.getElementById('try-it-here').nextElementSibling;
const button = make('button', { type: 'button', className: 'run', id: 'start' }, 'Start PostgreSQL in this page');
const note = make('span', { role: 'status' }, 'It loads 6 MB from this site. Nothing leaves your browser.');
intro.replaceChildren(button, ' ', note);
intro.className = 'buttons';

button.addEventListener('click', async () => {
  button.disabled = true;
  note.textContent = 'Loading 6 MB…';
  try {
    await (loaded ??= load());
  } catch (error) {
    loaded = undefined;
    button.disabled = false;
    note.textContent = location.protocol === 'file:' ? 'Browsers load it only from a web server: python3 -m http.server --directory site'
      : `It did not start: ${error.message}`;
    return;
  }
  const section = [];
  for (let next = intro.nextElementSibling; next && next.tagName !== 'H2'; next = next.nextElementSibling) section.push(next);
  let title = 'Procedure';
  let first;
  for (const element of section) {
    if (element.tagName === 'H3') title = element.textContent;
    if (!element.matches('pre.language-sql')) continue;
    const start = makeStep(element, title, !first);
    first ??= start;
  }
  note.tabIndex = -1;
  note.focus();
  button.remove();
  await first();
  if (!db) {
    note.textContent = 'PostgreSQL did not start.'; // the step says why
    return;
  }
  const [{ rows: [[version]] }] = await db.exec('SHOW server_version', options);
  note.textContent = `PostgreSQL ${version} runs in this page, with the portable edition. Edit any statement; Ctrl+Enter runs it.`;
});
