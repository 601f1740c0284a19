"""Read invoke.yaml and the --config file through Invoke, and check that both consist of sections with settings.

Empty sections are ignored.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

from invoke import config, exceptions

from toolchain import caller
from toolchain.config import SECTIONS
from toolchain.errors import ConfigError


class SettingsFiles(config.Config):
    """Invoke's configuration.

    If a file is malformed, the program lists all errors in the file and exits with ConfigError's exit code.
    """

    def load_runtime(self, merge: bool = True) -> None:
        """Read the --config file, which must exist; the file's path is relative to the caller's folder."""
        if given := self._runtime_path:
            path = caller.path(os.fspath(given))
            if path.suffix.lstrip(".") not in self._file_suffixes:
                kinds = ", ".join(f".{suffix}" for suffix in self._file_suffixes)
                raise _refusal([f"--config: expected a file whose name ends in one of {kinds}, found {given!r}"])
            try:
                path.open("rb").close()
            except OSError as fault:
                raise _refusal([f"--config: {path}: {fault.strerror}"]) from fault
            self.set_runtime_path(path)
        else:
            self.set_runtime_path(None)
        super().load_runtime(merge)

    def _load_yaml(self, path: Any) -> dict[str, Any]:
        return _read(path, "YAML", super()._load_yaml)

    _load_yml = _load_yaml

    def _load_json(self, path: Any) -> dict[str, Any]:
        return _read(path, "JSON", super()._load_json)

    def _load_py(self, path: Any) -> dict[str, Any]:
        return _read(path, "valid Python", super()._load_py)


def named(settings: Any) -> Mapping[str, Any]:
    """Return the contents of the --config file, or an empty mapping if the option was not given."""
    found: Mapping[str, Any] = getattr(settings, "_runtime", {})
    return found


def _read(path: Any, form: str, load: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        document = load(path)
        found, faults = checked(document)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(errno.ENOENT, fault.strerror, path) from fault  # Invoke then tries the next file
        raise _refusal([f"{path}: {fault.strerror}"]) from fault
    except RecursionError as fault:
        raise _refusal([f"{path}: expected sections with settings, found {form} that is nested too deeply"]) from fault
    except Exception as fault:  # the YAML reader raises various exceptions for invalid tags, dates and numbers
        raise _refusal([f"{path}: not {form}: {' '.join(str(fault).split())}"]) from fault
    if faults:
        raise _refusal([f"{path}: {fault}" for fault in faults])
    return found


def checked(document: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a file's non-empty sections and the list of errors in its structure."""
    if document is None:
        return {}, []
    if not isinstance(document, Mapping):
        return {}, [f"expected sections with settings, found {document!r}"]
    of_invoke = config.Config.global_defaults()
    found: dict[str, Any] = {}
    faults: list[str] = []
    for name, section in document.items():
        if not isinstance(name, str):
            faults.append(f"{name!r}: expected the name of a section; YAML reads it as {type(name).__name__}")
        elif isinstance(of_invoke.get(name), Mapping) and not isinstance(section, Mapping):
            faults.append(f"{name}: expected a section with Invoke's own settings, found {section!r}")
        elif name in of_invoke:
            faults += [
                f"{name}.{key}: {wrong}"
                for key, value in section.items()
                if (wrong := _not_of_invoke(name, key, value))
            ]
            found[name] = section
        elif name not in SECTIONS:
            found[name] = None  # load_config reports the unknown name
        elif isinstance(section, Mapping):
            faults += [f"{name}.{key}: {wrong}" for key, value in section.items() if (wrong := _wrong(key, value))]
            found[name] = section
        elif section is not None:
            faults.append(f"{name}: expected a section with keys, found {section!r}")
    return found, faults


def _not_of_invoke(section: str, key: Any, value: Any) -> str:
    """Check one of Invoke's own settings. Return the error as text, or an empty string if the setting is valid."""
    usual = config.Config.global_defaults()[section]
    if key not in usual:
        return f"Invoke has no such setting; valid: {', '.join(usual)}"
    if section == "runners" or key == "executor_class":
        return f"a class cannot be set here, found {value!r}"
    if isinstance(value, Mapping):
        return (
            ""
            if all(isinstance(item, str) for item in (*value, *value.values()))
            else "expected names with text values"
        )
    expected = type(usual[key])
    if usual[key] is not None and not isinstance(value, expected):
        return f"expected a value such as {usual[key]!r}, found {value!r}"
    return ""


def _wrong(key: Any, value: Any) -> str:
    if not isinstance(key, str):
        return f"expected the name of a setting; YAML reads it as {type(key).__name__}"
    return f"expected a value, found {value!r}" if isinstance(value, Mapping) else ""


def _refusal(faults: list[str]) -> exceptions.Exit:
    fault = ConfigError(faults)
    return exceptions.Exit(str(fault), code=fault.exit_code)
