"""Simulated hidden states: a direction that every step shares, one for the state, one for its wording."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

DIM = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """phi = common * u + signal * s(state) + noise * w(observation), all unit vectors but the common one scaled.

    s(state) is made of a vector for each of room, place of the object and its condition, so that states which share
    some are nearer. With the healthy numbers two wordings of one state are at cosine distance 0.04 (they differ in the
    noise alone), states that differ in one part at about 0.13, in all three at about 0.33. Collapsed, the state
    moves phi less than the wording does: one giant cluster from epsilon 0.1 on.
    """

    common: float = 1.5
    signal: float = 1.0
    noise: float = 0.35
    seed: int = 0

    def vector(self, state: str, observation: str) -> np.ndarray:
        """[DIM] float64, the same for the same arguments in every process."""
        parts = [self._unit(f"{part} {i}") for i, part in enumerate(state.split("|"))]
        phi = self.common * self._unit("common") + self.signal * np.mean(parts, axis=0) * len(parts) ** 0.5
        return phi + self.noise * self._unit(f"wording {observation}")

    def _unit(self, name: str) -> np.ndarray:
        vector = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(DIM)
        return vector / np.linalg.norm(vector)


GEOMETRIES = {"healthy": Geometry(), "collapsed": Geometry(signal=0.1)}
