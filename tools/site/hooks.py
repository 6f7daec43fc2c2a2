"""Hooks of mkdocs: pages outside docs/, and the headings and links of GitHub.

The pages of docs/ link to files in the whole repository. Each linked file becomes a part
of the site, under repository/: a Markdown file as a page, another one as text.
"""

import gzip
import html
import json
import os
import posixpath
import re
import shutil
import sys

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FENCED = re.compile(r"^```.*?^```[ \t]*$", re.M | re.S)
CODE = re.compile(FENCED.pattern + r"|`[^`\n]+`", re.M | re.S)
BLOCK = re.compile(r'<pre><code class="language-(\w+)">(.*?)</code></pre>', re.S)
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
SOURCES_OF_PICTURES = (".dot", ".csv", ".gnuplot")
PGLITE = os.path.join(ROOT, "test/clients/node_modules/@electric-sql/pglite")


def slug(text, separator):
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def outside(code_pattern, function, text):
    """Apply a function to the parts of a page that are not code."""
    parts, end = [], 0
    for code in code_pattern.finditer(text):
        parts += [function(text[end : code.start()]), code.group()]
        end = code.end()
    return "".join(parts) + function(text[end:])


def target_of(page, link):
    """The path in the repository to which a link of a page leads; a directory means its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    readme = posixpath.join(path, "README.md")
    if os.path.isfile(os.path.join(ROOT, readme)):
        return readme
    return path


def name_in_site(path):
    """The source name in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path[len("docs/") :]
    name = "repository/" + path
    if not path.endswith((".md", ".png", ".svg")):
        name += ".txt"
    return name


def links(page):
    """The paths in the repository to which a page links."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        text = CODE.sub("", file.read())
    found = (link.group(2) for link in LINK.finditer(text))
    return {target_of(page, link) for link in found if link and ":" not in link}


def lists(text):
    """Lists for Python-Markdown, which begins one only after an empty line, and wants four
    spaces before a paragraph in it."""
    text = re.sub(r"^(?!(?:[-*]|\d+\.) |\s|\|)(.*\S.*)\n(?=(?:[-*]|1\.) )", r"\1\n\n", text, flags=re.M)
    return re.sub(r"\n\n {2,3}([^ \n-].*)\n(?=[-*] )", r"\n\n    \1\n\n", text)


def on_config(config):
    config["mdx_configs"].setdefault("toc", {}).update(slugify=slug, toc_depth="2-3")
    config["extra"]["playground"] = os.path.isdir(PGLITE)
    if not os.path.isdir(PGLITE):
        print("no PGlite, so the start page runs nothing; with npm, tools/prerequisites docs installs it", file=sys.stderr)
    return config


def on_files(files, config):
    for file in list(files):
        if file.src_uri.endswith(SOURCES_OF_PICTURES):
            files.remove(file)
    config.path_of = {file.src_uri: "docs/" + file.src_uri for file in files}

    waiting = [path for path in config.path_of.values() if path.endswith(".md")]
    while waiting:
        for path in links(waiting.pop()):
            name = name_in_site(path)
            if name in config.path_of or not os.path.isfile(os.path.join(ROOT, path)):
                continue
            file = File(name, ROOT, config["site_dir"], config["use_directory_urls"])
            file.abs_src_path = os.path.join(ROOT, path)
            files.append(file)
            config.path_of[name] = path
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_nav(nav, config, files):
    missing = [
        file.src_uri
        for file in files.documentation_pages()
        if file.page not in nav.pages and not file.src_uri.startswith("repository/")
    ]
    if missing:
        raise PluginError("mkdocs.yml: nav lacks " + ", ".join(missing))
    return nav


def on_page_markdown(markdown, page, config, files):
    here = config.path_of[page.file.src_uri]

    def rewritten(link):
        start, target, anchor, end = link.groups(default="")
        if not target or ":" in target:
            return link.group()
        path = target_of(here, target)
        if not os.path.isfile(os.path.join(ROOT, path)):
            if not os.path.isdir(os.path.join(ROOT, path)):
                raise PluginError(f"{here}: no file {target}")
            return start + "#directory" + end
        name = posixpath.relpath(name_in_site(path), posixpath.dirname(page.file.src_uri) or ".")
        return start + name + anchor + end

    markdown = outside(FENCED, lists, markdown)
    markdown = outside(CODE, lambda text: LINK.sub(rewritten, text), markdown)
    return re.sub(r"\[([^]]*)\]\(#directory\)", r"\1", markdown)  # which has no page


def on_post_page(output, page, config):
    """Wide tables scroll, and code has colors. The search index has the page without them."""

    def coloured(block):
        language, code = block.groups()
        lexer = get_lexer_by_name({"sql": "postgresql", "pgsql": "postgresql"}.get(language, language), stripnl=False)
        spans = highlight(html.unescape(code), lexer, HtmlFormatter(nowrap=True))
        return f'<pre class="language-{language}"><code>{spans}</code></pre>'

    output = output.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    output = output.replace(">idempotency.", ">idempotency.<wbr>")  # names of settings in narrow columns
    return BLOCK.sub(coloured, output)


def copy_pglite(target):
    """What theme/playground.js loads: PGlite's modules, and compressed files."""
    os.makedirs(target)
    shutil.copy(os.path.join(PGLITE, "LICENSE"), target)
    waiting = ["index.js"]
    while waiting:
        name = waiting.pop()
        if not os.path.exists(os.path.join(target, name)):
            with open(os.path.join(PGLITE, "dist", name), encoding="utf-8") as file:
                text = file.read()
            with open(os.path.join(target, name), "w", encoding="utf-8") as file:
                file.write(re.sub(r"\n//# sourceMappingURL=.*", "", text))
            waiting += re.findall(r"""(?:from|import)"\./([^"]+)\"""", text)
    files = [os.path.join(PGLITE, "dist", name) for name in ("pglite.wasm", "pglite.data", "initdb.wasm")]
    for path in files + [os.path.join(ROOT, "portable/idempotency.sql")]:
        with open(path, "rb") as file, open(os.path.join(target, os.path.basename(path) + ".gzip"), "wb") as packed:
            packed.write(gzip.compress(file.read(), 6, mtime=0))


def on_post_build(config):
    """A script with the search index: a browser loads no other files without a web server."""
    if config["extra"]["playground"]:
        copy_pglite(os.path.join(config["site_dir"], "pglite"))
    directory = os.path.join(config["site_dir"], "search")
    with open(os.path.join(directory, "search_index.json"), encoding="utf-8") as file:
        entries = json.load(file)["docs"]
    with open(os.path.join(directory, "index.js"), "w", encoding="utf-8") as file:
        file.write("var searchEntries = " + json.dumps(entries, separators=(",", ":")) + ";\n")
    for unused in ("search_index.json", "main.js", "worker.js"):
        os.remove(os.path.join(directory, unused))
