"""All settings together: what they must agree on, and how they are read and written.

A configuration file is YAML with the sections below and holds only what differs from the defaults;
``--set section.key=value`` overrides it. Relative paths, also in a file, are relative to the
current folder, and are stored as absolute. The resolved configuration of a run is written to
``config.yaml`` in its folder.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from unet3d.config.explain import phrase_of, settings_of
from unet3d.config.settings import (
    DataSettings,
    InferenceSettings,
    MemorySettings,
    ModelSettings,
    ParallelSettings,
    PatchSettings,
    TrainingSettings,
)
from unet3d.config.values import Section
from unet3d.errors import ConfigError, reason_of
from unet3d.inputs.plain_data import explained, printable, shown
from unet3d.inputs.reading import read_bytes

MAX_BYTES = 2**18
"""Largest configuration file, many times the size of one with every setting."""

_WIDTH = 96
_HEADER = """\
All settings of unet3d, each with its meaning and its allowed values. A configuration needs only the
lines that differ from the defaults: delete the others."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"training.epochs": 50, "training.steps_per_epoch": 250},
    "full": {
        "patches.memory_gib": 10.0,
        "patches.augmentation": "nnunet",
        "training.epochs": 1000,
        "training.steps_per_epoch": 250,
        "training.optimizer": "sgd",
    },
    "resenc-m": {"model.encoder": "residual", "patches.memory_gib": 8.38},
    "resenc-l": {"model.encoder": "residual", "patches.memory_gib": 22.35},
}
"""Settings of each preset, the same on every device. ``full`` is as long as nnU-Net's training
(Isensee et al., Nature Methods 2021). ``resenc-m`` and ``resenc-l`` are nnU-Net's residual
encoders, planned for 9 and 24 GB (10^9 bytes) of GPU memory (Isensee et al., arXiv 2404.09556)."""


class _PlainLoader(yaml.SafeLoader):
    """Refuses names given twice, and aliases: a few lines with aliases can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ValueError(f"line {line}: anchors (&) and aliases (*) are not allowed")
        node: yaml.Node | None = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        line = key.start_mark.line + 1
                        raise ValueError(f"line {line}: {key.value[:60]!a} is named twice")
                    seen.add(key.value)
        return node


def parse_yaml(text: str) -> Any:
    """Return the plain values of one YAML document; a one-line ValueError says what is wrong."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


class Config(Section):
    """Everything needed to repeat a run."""

    data: DataSettings = DataSettings()
    patches: PatchSettings = PatchSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    parallel: ParallelSettings = ParallelSettings()
    memory: MemorySettings = MemorySettings()
    inference: InferenceSettings = InferenceSettings()

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        training, parallel, mode = self.training, self.parallel, self.parallel.mode
        num_micro_batches, batch_size = training.num_micro_batches, training.batch_size
        if batch_size != "auto" and num_micro_batches > batch_size:
            raise ValueError(
                f"training.micro_batches is {num_micro_batches} but a batch "
                f"has {batch_size} patches; use at most one micro-batch per patch"
            )
        if self.memory.offload == "skips" and self.memory.recompute == "level":
            raise ValueError(
                "memory.offload=skips with memory.recompute=level would offload nothing: skips are "
                "recomputed; use memory.offload=none, or memory.recompute=norm"
            )
        threads = parallel.data_parallel is not False
        for name, is_set, modes in (
            ("replicas", parallel.replicas > 1, ("auto", "model", "spatial")),
            ("data_parallel", threads, ("data",)),
            ("cuts", parallel.cuts not in ("auto", "encoder-decoder"), ("model",)),
        ):
            if is_set and mode not in modes:
                raise ValueError(
                    f"parallel.{name} is {shown(getattr(parallel, name))} but parallel.mode {mode} "
                    f"makes no use of it; leave it out, or use --parallel {' or '.join(modes)}"
                )
        if threads and num_micro_batches > 1:
            raise ValueError(
                "parallel.data_parallel takes no micro-batches, but training.micro_batches is "
                f"{num_micro_batches}; leave one of them out"
            )
        if self.model.norm == "batch" and (mode == "spatial" or num_micro_batches > 1):
            raise ValueError(
                f"model.norm is batch but parallel.mode {mode} with training.micro_batches "
                f"{num_micro_batches} never has the whole batch together; use model.norm=instance"
            )
        return self

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """Return a copy with some settings replaced, by dotted key, or raise ConfigError."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        for key, value in values.items():
            _put(tree, key, value)
        return _validated(tree)

    def flat(self, only_set: bool = False) -> dict[str, Any]:
        """Return settings as plain values by dotted key: all, or only the settings that are set."""

        def items(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
            for key, value in tree.items():
                if isinstance(value, dict):
                    yield from items(value, f"{prefix}{key}.")
                else:
                    yield f"{prefix}{key}", value

        return dict(items(self.model_dump(mode="json", exclude_unset=only_set), ""))

    def is_open(self, key: str) -> bool:
        """Return whether a setting, by its dotted key, is still ``auto``."""
        *sections, name = key.split(".")
        section = attrgetter(".".join(sections))(self)
        return section.may_be_open(name) and name not in section.model_fields_set

    def differs(self, key: str) -> bool:
        """Return whether a setting, or any of a section, differs from its default."""
        return bool(attrgetter(key)(self) != attrgetter(key)(Config()))

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Config":
        """Read what ``model_dump(mode="json")`` gave, such as from another rank."""
        return _validated(dict(values))

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        """Read what :meth:`to_yaml` wrote."""
        return _validated(_parsed(text, "stored settings"), "stored settings")

    def to_yaml(self) -> str:
        """Return every setting as YAML that :func:`load_config` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(
    path: Path | None = None, changes: Mapping[str, Any] | Iterable[str] = ()
) -> Config:
    """Read a configuration file and apply changes.

    Args:
        path: A YAML file, or None for the defaults.
        changes: Dotted key to value, or ``section.key=value`` strings, see :func:`parsed_changes`.
            Later changes override earlier ones.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value is wrong. The message
            names all problems.
    """
    source, tree = "", {}
    if path is not None:
        try:
            tree = _parsed(read_bytes(path, MAX_BYTES).decode(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "not a text file"
            raise ConfigError(
                f"cannot read the configuration {path}: {reason}; name a YAML file"
            ) from error
        source = str(path)
        with suppress(ConfigError):
            _validated(tree, source)
            source = ""  # the file alone is valid, so the error is in a change
    values = changes if isinstance(changes, Mapping) else parsed_changes(changes)
    for key, value in values.items():
        _put(tree, key, value)
    return _validated(tree, source)


def parsed_changes(texts: Iterable[str]) -> dict[str, Any]:
    """Return dotted key to value of ``section.key=value`` strings."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {printable(text)}: write section.key=value")
        changes[key.strip()] = parsed_value(key.strip(), value)
    return changes


def parsed_value(key: str, value: Any) -> Any:
    """Return the plain value of a setting from typed text or a Python value.

    Text is YAML (``[32,32,32]``, ``true``); a comma-separated list needs no brackets, and a path
    needs no quotes.
    """
    if not isinstance(value, str):
        return value.tolist() if hasattr(value, "tolist") else value  # NumPy array or number
    setting = settings_of(Config).get(key)
    if setting is not None and setting.is_path:
        return None if value in ("", "null") else value  # it may hold a comma or a #
    try:
        parsed = parse_yaml(value)
        if isinstance(parsed, str) and "," in parsed:
            return [parse_yaml(item) for item in parsed.split(",") if item.strip()]
    except ValueError as error:
        raise ConfigError(
            f"--set {printable(key)}: the value {shown(value)} is not valid YAML: "
            f"{printable(str(error), 400)}"
        ) from error
    return parsed


def commented_yaml(config: Config) -> str:
    """Return a configuration as YAML with a comment above every setting."""
    lines, tree = _comment(_HEADER, ""), config.model_dump(mode="json")
    for setting in settings_of(Config).values():
        *sections, name = setting.key.split(".")
        indent = "  " * len(sections)
        if not sections:
            lines.append("")
        lines += _comment(setting.meaning, indent)
        if setting.is_section:
            lines.append(f"{indent}{name}:")
            continue
        is_open = config.is_open(setting.key)
        value = "auto" if is_open else reduce(getitem, setting.key.split("."), tree)
        allowed = f"Allowed: {setting.allowed}."
        if value != setting.default:
            allowed += f" Default: {in_yaml(setting.default)}."
        lines += [*_comment(allowed, indent), f"{indent}{name}: {in_yaml(value)}"]
    return "\n".join(lines) + "\n"


def in_yaml(value: Any) -> str:
    """Return a setting's plain value as it stands in a configuration, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def preset_changes(names: Iterable[str]) -> dict[str, Any]:
    """Return the settings of presets, in their order: dotted key to value."""
    changes: dict[str, Any] = {}
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {shown(name)}; take one of {', '.join(PRESETS)}")
        changes |= PRESETS[name]
    return changes


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid YAML: {printable(str(error), 400)}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{source} must hold sections and settings, not a {type(tree).__name__}")
    return tree or {}


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        if not isinstance(tree[section], dict):
            raise ConfigError(f"{printable(section)} is {shown(tree[section])}, not a section")
        tree = tree[section]
    tree[last] = value


def _validated(tree: dict[str, Any], source: str = "") -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = explained(error, lambda problem: phrase_of(problem, Config, tree))
        raise ConfigError(f"{source}: {problems}" if source else problems) from error


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    plain = text.replace("``", "")
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False
    )
