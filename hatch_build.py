"""Puts the CUDA sources and the configuration into the wheel, inside the packages that read them.

Not in editable installs: a copy made there would go stale, and the packages find the checkout's own folders.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_MAP = {"cuda": "runtime/_kernels", "conf": "calib/_conf"}


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"].update(WHEEL_MAP)
