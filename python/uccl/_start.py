"""The functions that vLLM and SGLang call when a process of theirs starts (entry points in pyproject.toml).

``register_weight_transfer`` adds a backend to vLLM's weight transfer. ``provide_nixl_plugin`` sets ``NIXL_PLUGIN_DIR`` where NIXL is installed, the program asks for the backend ``UCCL``, and the variable is
not set. Processes that the program starts inherit the variable. Nothing else happens, and no start fails: an error is
one line of the log.

Every process of every program on vLLM or SGLang runs this, so that nothing slow is imported before the answer is
yes. Where no sign of ``UCCL`` is found, NIXL stays as it is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["provide_nixl_plugin", "register_weight_transfer"]

_VARIABLE = "NIXL_PLUGIN_DIR"
_BACKEND = "UCCL"
_PLUGIN = "libplugin_UCCL.so"
#: Files of settings that a command line names, and the one that a variable of LMCache names.
_SETTINGS_FILES = (".yaml", ".yml", ".json")
_SETTINGS_VARIABLE = "LMCACHE_CONFIG_FILE"
_SETTINGS_MAX_LEN = 1 << 20
#: The number of calls between vLLM's loader and the function that has the engine's configuration, and some more.
_CALLERS = 12
_told = False


def provide_nixl_plugin() -> None:
    """Has NIXL find the backend ``UCCL`` in this process, if the program asks for it."""
    try:
        if _is_asked_for():
            _provide()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # BaseException: a panic of the extension module is none of Exception.
        _warn(str(error))


def register_weight_transfer() -> None:
    """Registers the backend ``uccl`` of vLLM's weight transfer in this process. Nothing of it is loaded before it is
    asked for, and a vLLM with another interface (before 0.33) is left as it is."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:
        return
    except Exception as error:
        # An exception of a plugin ends the process that loads it.
        _log().warning("vLLM's weight transfer is left without the backend uccl: %s", error)
        return
    for factory, name in (
        (WeightTransferEngineFactory, "UcclWeightTransferEngine"),
        (WeightTransferTrainerFactory, "UcclTrainerWeightTransferEngine"),
    ):
        try:
            factory.register_engine("uccl", "uccl.vllm", name)
        except ValueError:
            # It is there already: vLLM loads its plugins once for each engine.
            continue


def _provide() -> None:
    given = os.environ.get(_VARIABLE)
    if given is None:
        from uccl.nixl import plugin_dir

        os.environ[_VARIABLE] = plugin_dir()
        _log().info("%s=%s, for the backend UCCL", _VARIABLE, os.environ[_VARIABLE])
    elif not os.path.exists(os.path.join(given, _PLUGIN)):
        # Images set it for a NIXL of their own, and its plugins stay.
        _warn(
            f"{_VARIABLE}={given} is set and has no {_PLUGIN}. For both: "
            f"export {_VARIABLE}=$(python -m uccl.nixl --nixl-plugins {given})"
        )


def _warn(why: str) -> None:
    global _told
    if not _told:
        _told = True
        _log().warning("NIXL is left without the backend UCCL: %s", why)


def _log() -> Any:
    import logging

    return logging.getLogger("uccl")


def _is_asked_for() -> bool:
    # The texts are looked through as they come, the cheap ones first.
    return any(_names_backend(text) for text in _texts())


def _texts() -> Iterator[str]:
    """Where a program may say which of NIXL's backends it wants: its command line, its environment, its settings."""
    arguments = getattr(sys, "argv", [])[1:]
    yield from arguments
    # As SGLANG_DISAGGREGATION_NIXL_BACKEND and LMCACHE_NIXL_BACKENDS.
    yield from os.environ.values()
    yield from _configurations_of_callers()
    for path in (*arguments, os.environ.get(_SETTINGS_VARIABLE, "")):
        if path.endswith(_SETTINGS_FILES):
            yield _start_of(path.rpartition("=")[2])


def _names_backend(text: str) -> bool:
    if _BACKEND not in text:
        return False
    import re

    # Neither a part of a path nor of another name.
    return re.search(rf"(?<![\w./-]){_BACKEND}(?![\w./-])", text) is not None


def _configurations_of_callers() -> Iterator[str]:
    """The KV transfer's configuration, where a program has made vLLM's engine in Python.

    vLLM's loader passes none, but it is called by functions that have it: the method of the engine's arguments
    (``self``), the engine's and the worker's (``vllm_config``).
    """
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if not str(frame.f_globals.get("__name__", "")).startswith("vllm."):
            continue
        for name in ("self", "vllm_config"):
            configuration = _fields(frame.f_locals.get(name)).get("kv_transfer_config")
            if configuration is not None:
                yield repr(configuration)


def _fields(owner: object) -> dict[str, Any]:
    """The fields that an object has itself: a wrapper of vLLM asks an object that it does not have yet for others."""
    try:
        fields: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return fields


def _start_of(path: str) -> str:
    # A pipe gives its bytes once, and to the program.
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_SETTINGS_MAX_LEN)
    except OSError:
        # The program itself reports a file that it cannot read.
        return ""
