"""The keys of a model's config.json, read with errors that say which file, which key and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import ConfigError

LARGEST = 1 << 40


class Keys:
    """One JSON object of a named file. A key whose value is null counts as missing, as it does for transformers."""

    def __init__(self, file: str, content: Mapping[str, object]) -> None:
        self.file = file
        self._content = content

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._content.get(key) is not None

    def number(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number from `least` to `most`; the default where it is missing."""
        value = self._content.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.file}: {key} is missing; add it, or give a whole config.json of the model")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{self.file}: {key}={value!r} is not a whole number from {least} to {most}; correct it")
        return value

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {key}={value!r} is neither true nor false; correct it")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        """Text."""
        value = self._content.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.file}: {key} is missing or no text; give a whole config.json of the model")
        return value

    def names(self, key: str) -> list[str]:
        """A list of names; empty where it is missing."""
        value = self._content.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(it, str) for it in value):
            raise ConfigError(f"{self.file}: {key} is not a list of names; correct it")
        return value

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty where it is missing."""
        value = self._content.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(it, int) and not isinstance(it, bool) for it in value):
            raise ConfigError(f"{self.file}: {key} is not a list of whole numbers; correct it")
        return value

    def part(self, key: str) -> Keys:
        """The keys of an object within; none where it is missing."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {key} is not an object; give a whole config.json of the model")
        return Keys(f"{self.file}: {key}" if value else self.file, value or {})
