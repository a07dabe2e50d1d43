"""ScreenLogger, which scripts for AMD Quark log with."""

from __future__ import annotations

import logging
import os
from typing import Any

from quark.errors import InvalidValueError
from quark.text import get_logger

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class ScreenLogger:
    """Logs to standard error with the level in front. The environment variable QUARK_LOG_LEVEL sets the level, and
    `set_shared_level` that of all of them. `allow_duplicate=False` drops a message that was logged before;
    `error_code` is put in front of an error."""

    _loggers: list[logging.Logger] = []  # noqa: RUF012 - one list for all
    _shared_level: int | None = None  # None: that of the environment

    def __init__(self, name: str) -> None:
        self.logger = get_logger(f"{name}_screen")
        self.logger.propagate = False
        if not self.logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[QUARK-%(levelname)s]: %(message)s"))
            self.logger.addHandler(handler)
        self.logger.setLevel(_level_of_environment() if self._shared_level is None else self._shared_level)
        self._loggers.append(self.logger)
        self._seen: set[str] = set()

    @classmethod
    def set_shared_level(cls, level: int | None) -> None:
        cls._shared_level = level
        for logger in cls._loggers:
            logger.setLevel(_level_of_environment() if level is None else level)

    def debug(self, msg: str, *args: Any, **options: Any) -> None:
        self._log(logging.DEBUG, msg, args, options)

    def info(self, msg: str, *args: Any, **options: Any) -> None:
        self._log(logging.INFO, msg, args, options)

    def warning(self, msg: str, *args: Any, **options: Any) -> None:
        self._log(logging.WARNING, msg, args, options)

    def error(self, msg: str, *args: Any, error_code: object = None, **options: Any) -> None:
        code = "" if error_code is None else f"[Error Code: {error_code}] "
        self._log(logging.ERROR, f"{code}{msg}", args, options)

    def exception(self, msg: str, *args: Any, **options: Any) -> None:
        self._log(logging.ERROR, msg, args, {"exc_info": True, **options})

    def critical(self, msg: str, *args: Any, **options: Any) -> None:
        self._log(logging.CRITICAL, msg, args, options)

    def _log(self, level: int, msg: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        is_wanted = options.pop("allow_duplicate", True) or msg not in self._seen
        self._seen.add(msg)
        if is_wanted:
            self.logger.log(level, msg, *args, **options)


def _level_of_environment() -> int:
    name = os.environ.get("QUARK_LOG_LEVEL", "info").lower()
    if name not in _LEVELS:
        raise InvalidValueError(f"QUARK_LOG_LEVEL={name}: expected {', '.join(_LEVELS)}")
    return int(_LEVELS[name])
