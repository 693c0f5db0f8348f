"""What MkDocs needs beside ``docs/*.md`` to build the site: pages from elsewhere, and links.

Documents are written for a reader of the repository: README.md stands in its root, and links name
files by their place in it. Here they get their place on the site: README becomes the front page,
links to documents lead to their pages, and any other file that is linked is copied to the site.
Three pages are made anew in each build: commands, settings, and the configurations in ``configs``.
"""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from unet3d.cli.app import commands
from unet3d.config import Config
from unet3d.config.configuration import in_yaml
from unet3d.config.explain import settings_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "data/README.md": "data.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "configs": "configurations.md",
    "unet3d/cli/app.py": "reference/commands.md",
    "unet3d/config/settings.py": "reference/settings.md",
}
"""The page that is made of each file or folder outside ``docs``."""

# For the front page, which is the only page of its tab.
_WITHOUT_NAVIGATION = ("---", "hide: [navigation]", "---", "")
_LINK = re.compile(r"(\]\()([^)\s#]+)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give every document its place on the site; MkDocs calls this before it builds.

    Args:
        files: The files in ``docs``.
        config: Of the site.

    Returns:
        The files of the site.
    """
    documents = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES if name.endswith(".md")
    }
    for file in list(files.documentation_pages()):
        documents[f"docs/{file.src_uri}"] = file.content_string
        files.remove(file)
    linked: set[str] = set()
    for name, text in documents.items():
        content = _with_links_of_the_site(name, text, linked)
        if _place(name) == "index.md":
            content = "\n".join([*_WITHOUT_NAVIGATION, content])
        files.append(File.generated(config, _place(name), content=content))
    for name in sorted(linked - documents.keys() - PAGES.keys()):
        if files.get_file_from_path(_place(name)) is None:
            source = str(ROOT / name)
            files.append(File.generated(config, _place(name), abs_src_path=source))
    files.append(File.generated(config, PAGES["configs"], content=_configurations()))
    page = PAGES["unet3d/cli/app.py"]
    files.append(File.generated(config, page, content=_commands()))
    page = PAGES["unet3d/config/settings.py"]
    files.append(File.generated(config, page, content=_settings()))
    return files


def _with_links_of_the_site(name: str, text: str, linked: set[str]) -> str:
    """Return a document with each link to a file of the repository changed to one of the site.

    Args:
        name: The document, from the root of the repository.
        text: Its Markdown.
        linked: The files that it links to are added.
    """

    def change(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link[2]):  # https: and the like
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link[2]))
        if target.startswith("..") or not (ROOT / target).exists():
            raise PluginError(f"{name} links to {link[2]}, which does not exist")
        if (ROOT / target).is_dir() and target not in PAGES:
            raise PluginError(f"{name} links to the folder {link[2]}, which has no page")
        linked.add(target)
        return link[1] + posixpath.relpath(_place(target), posixpath.dirname(_place(name)) or ".")

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(change, part) for part in parts)


def _place(name: str) -> str:
    """Return where a file of the repository is on the site."""
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    name = name.removeprefix(".")  # MkDocs leaves out what is hidden
    return f"files/{name}" if Path(name).suffix else f"files/{name}.txt"


def _commands() -> str:
    lines = ["# Commands", "", "What `unet3d COMMAND --help` prints."]
    context = click.Context(commands, info_name="unet3d", **commands.context_settings)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        if command is not None and not command.hidden:
            own = click.Context(command, info_name=name, parent=context)
            lines += ["", f"## unet3d {name}", "", "```text", command.get_help(own), "```"]
    return "\n".join(lines) + "\n"


def _settings() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting, as `unet3d config` prints it. A configuration is a YAML file that needs "
        "only settings that differ from the defaults; `--set section.key=value` changes a setting "
        "of one command.",
    ]
    everything = settings_of(Config).values()
    for section in everything:
        if not section.is_section:
            continue
        lines += ["", f"## {section.key}", "", section.meaning, ""]
        lines += ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
        for setting in everything:
            place, _, name = setting.key.rpartition(".")
            if place == section.key and not setting.is_section:
                link = f"[`{name}`](#{setting.key}){{#{setting.key}}}"
                cells = (link, f"`{in_yaml(setting.default)}`", setting.allowed, setting.meaning)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _configurations() -> str:
    lines = [
        "# Example configurations",
        "",
        "From the folder `configs` of the repository. Each begins with a command that uses it.",
    ]
    for path in _sorted_by_name((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        lines += ["", f"## {path.name}", "", "```yaml", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _sorted_by_name(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.name)
