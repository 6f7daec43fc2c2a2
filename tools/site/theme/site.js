// The menu of a narrow screen, and the search. The index is a script, because a browser
// loads no other files without a web server.

'use strict';

const menu = document.getElementById('menu');
const query = document.getElementById('query');
const results = document.getElementById('results');
let index; // a promise

menu.addEventListener('click', () => {
  const open = document.getElementById('navigation').classList.toggle('open');
  menu.setAttribute('aria-expanded', open);
});

function load(path) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = `${base}/search/${path}`;
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
}

// Names such as try_claim are found whole, and by each of their words.
function tokens(text) {
  const words = text.toLowerCase().match(/[a-z0-9_.]+/g) || [];
  return words.flatMap((word) => [word, ...word.split(/[_.]+/)]).filter((word) => word !== '');
}

async function build() {
  await Promise.all([load('lunr.js'), load('index.js')]);
  return lunr(function () {
    this.tokenizer = (text) => tokens(String(text)).map((word) => new lunr.Token(word));
    this.ref('number');
    this.field('title', { boost: 8 });
    this.field('text');
    searchEntries.forEach((entry, number) => {
      const forContributors = /^(repository|internals)\//.test(entry.location);
      this.add({ number, title: entry.title, text: entry.text }, { boost: forContributors ? 0.3 : 1 });
    });
  });
}

function found(words, built) {
  return built.query((q) => {
    for (const word of words) {
      q.term(word, { boost: 10 });
      q.term(word, { wildcard: lunr.Query.wildcard.TRAILING });
    }
  });
}

function excerpt(text, words) {
  const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
  return (at ? '… ' : '') + text.slice(at, at + 160);
}

async function search() {
  const words = [...new Set(tokens(query.value))];
  results.hidden = words.length === 0;
  if (results.hidden) return;
  index ??= build();
  const built = await index;
  const pages = new Map(searchEntries.filter((e) => !e.location.includes('#')).map((e) => [e.location, e.title]));
  results.replaceChildren();
  for (const { ref } of found(words, built).slice(0, 20)) {
    const entry = searchEntries[ref];
    const item = document.createElement('li');
    const link = document.createElement('a');
    const text = document.createElement('small');
    const page = pages.get(entry.location.split('#')[0]);
    link.href = `${base}/${entry.location}`;
    link.textContent = page === entry.title ? page : `${page}: ${entry.title}`;
    text.textContent = excerpt(entry.text, words);
    item.append(link, text);
    results.append(item);
  }
  if (!results.children.length) results.append('No results');
}

query.addEventListener('input', search);
query.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') results.hidden = true;
});
document.getElementById('search').addEventListener('submit', (event) => {
  event.preventDefault();
  const first = results.querySelector('a');
  if (first && !results.hidden) location.href = first.href;
});
document.addEventListener('click', (event) => {
  if (!event.target.closest('#search')) results.hidden = true;
});
results.addEventListener('click', () => { results.hidden = true; });
