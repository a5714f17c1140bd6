"""The table: what was measured and fitted for all candidates, in a folder of its own. Another budget needs no model."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as read_tensors
from safetensors.numpy import save as dump_tensors

from artifacts import Bundle, LayerFormat, ModelFingerprint
from artifacts.atomic import replace_folder
from artifacts.errors import FormatError, SignpostError
from artifacts.format import from_json
from calib.allocation.budget import Budget
from calib.allocation.candidates import SIDES, Candidates
from calib.allocation.damages import Damages
from calib.allocation.solve import Choice, solve
from calib.allocation.speed import Speed

VERSION = 1
RECORD, TENSORS = FILES = "table.json", "tensors.safetensors"


class TableError(SignpostError, ValueError):
    """A table cannot be read, or belongs to something else."""


@dataclass(frozen=True)
class Table:
    """Damages of the candidates for one model, and uniform bundles that hold their tensors.

    bundles     as `Candidates.recipes` orders them
    provenance  plain data: text, packages, what the measuring took
    """

    candidates: Candidates
    damages: Damages
    bundles: tuple[Bundle, ...]
    provenance: Mapping[str, Any]

    @property
    def model(self) -> ModelFingerprint:
        """Whose damages these are."""
        return self.bundles[0].model

    @property
    def layers(self) -> list[int]:
        """Those that a format is chosen for; the others stay in full precision."""
        return [layer for layer, formats in enumerate(self.bundles[0].layers) if formats]

    def fitted(self, side: str, name: str) -> Bundle:
        """The bundle that holds a variant's tensors."""
        return fitted(self.candidates, self.bundles)[f"{side}.{name}"]

    def bundle(self, budget: Budget, speed: Speed | None = None) -> Bundle:
        """The bundle of least predicted damage within the budget and the time that `speed` allows, if it bounds it.

        Raises ConfigError for a budget that lacks a length or that fp16 would fit, BudgetError where nothing fits,
        SpeedError for times of another model.
        """
        choice = self.choose(budget, speed)
        allocation = {
            "budget": budget.text,
            "bytes": choice.size,
            "tokens": budget.length,
            "predicted_kl": choice.damage,
            "candidates": self.candidates.config.name,
        }
        if speed is not None:
            allocation |= {"predicted_us": choice.us, "speed": speed.origin}
        return self.mixture(choice.candidates, {"allocation": allocation}, f"auto-{budget.text}")

    def mixture(self, chosen: NDArray[np.int64], provenance: Mapping[str, Any], recipe: str) -> Bundle:
        """The bundle of these candidates, int64 [2 layers] as `choose` numbers them, keys and values in turn."""
        candidates = self.candidates
        layers: list[LayerFormat | None] = [None] * self.model.l
        tensors = {"rope.inv_freq": self.bundles[0].tensors["rope.inv_freq"]}
        for row, layer in enumerate(self.layers):
            formats = {}
            for index, side in enumerate(SIDES):
                variant, filling = divmod(int(chosen[2 * row + index]), len(candidates.fillings))
                name = candidates.names(side)[variant]
                formats[side] = candidates.format(side, name, candidates.fillings[filling])
                prefix, source = f"layers.{layer}.{side}.", self.fitted(side, name)
                tensors |= {n: t for n, t in source.tensors.items() if n.startswith(prefix)}
            layers[layer] = LayerFormat(**formats)
        return Bundle(recipe, self.model, tuple(layers), tensors, {**self.provenance, **provenance})

    def choose(self, budget: Budget, speed: Speed | None = None) -> Choice:
        """The candidate of every side: variant times the number of fillings, plus the filling. Raises as `bundle`."""
        self.candidates.require_length(budget)
        if speed is not None:
            speed.require(self.model)
        geometry = self.bundles[0].geometry
        allowed = budget.allowed(geometry.numbers(budget.length)) - geometry.exact_bytes(budget.length)
        sizes, groups = zip(
            *(self.candidates.costs(side, self.model.h_kv, self.model.d, budget.length) for side in SIDES), strict=True
        )
        width = max(len(size) for size in sizes)
        layers = self.layers
        damage = np.full((len(layers), 2, width), np.inf)
        size, group = np.zeros((len(layers), 2, width), np.int64), np.zeros((len(layers), 2, width), np.int64)
        for index in range(2):
            count = len(sizes[index])
            damage[:, index, :count] = self.damages.of(index)[layers].reshape(-1, count)
            size[:, index, :count], group[:, index, :count] = sizes[index], groups[index]
        sides = 2 * len(layers), width
        pace = None if speed is None else speed.pace(self.candidates)
        return solve(damage.reshape(sides), size.reshape(sides), group.reshape(sides), allowed, pace=pace)

    def save(self, path: Path) -> Path:
        """Writes the table, atomically. Raises as `artifacts.atomic.replace_folder`."""
        tensors = {
            f"{i}.{name}": np.ascontiguousarray(t)
            for i, bundle in enumerate(self.bundles)
            for name, t in bundle.tensors.items()
        }
        data = dump_tensors(tensors)
        record = {
            "version": VERSION,
            "model": self.model.to_json(),
            "candidates": self.candidates.data,
            "damage": {name: x.tolist() for name, x in self.damages._asdict().items()},
            "provenance": self.provenance,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        files = {TENSORS: data, RECORD: (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()}
        return replace_folder(path, files, ours=lambda _: FILES)

    @classmethod
    def load(cls, path: Path, candidates: Candidates) -> "Table":
        """A table that was saved for these candidates. Raises TableError where it is damaged or for others."""
        try:
            record = json.loads((path / RECORD).read_bytes())
            data = (path / TENSORS).read_bytes()
            if record["version"] != VERSION:
                raise TableError(
                    f"table={path} is of version {record['version']}, this Signpost reads {VERSION}: {_OUT}"
                )
            if record["candidates"] != candidates.data:
                raise TableError(
                    f"table={path} was measured for other candidates than {candidates.config.name}: {_OUT}"
                )
            if hashlib.sha256(data).hexdigest() != record["sha256"]:
                raise TableError(f"table={path}: {TENSORS} was altered since it was written; {_OUT}")
            model = from_json(ModelFingerprint, record["model"], "model")
            tensors = read_tensors(data)
            damages = Damages(**{name: np.array(x, np.float64) for name, x in record["damage"].items()})
            bundles = tuple(
                Bundle(
                    f"table {i}",
                    model,
                    tuple(recipe.formats if recipe else None for recipe in recipes),
                    {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{i}.")},
                )
                for i, recipes in enumerate(candidates.recipes(model.l, model.sliding))
            )
            return cls(candidates, damages, bundles, record["provenance"])
        except (OSError, KeyError, TypeError, ValueError, FormatError, SafetensorError) as error:
            if isinstance(error, TableError):
                raise
            raise TableError(f"table={path} cannot be read ({str(error).splitlines()[0][:200]}): {_OUT}") from error


_OUT = "delete the folder to measure again, or name another one (table=)"


def fitted(candidates: Candidates, bundles: tuple[Bundle, ...]) -> dict[str, Bundle]:
    """The first bundle that holds each variant, by `<side>.<variant>`."""
    return {f"{side}.{name}": bundles[i] for side in SIDES for i, name in enumerate(candidates.names(side))}
