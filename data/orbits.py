"""Simulated planets around a star.

A system has 1 to 10 planets in a plane. Each goes round the star on a Kepler ellipse, and planets
do not pull each other (Vafa et al. 2025, "What has a foundation model found?"). The orbital
elements are drawn from fits of the known exoplanets. Units are AU, years and solar masses, so that
G = 4 pi^2. The vector from star to planet follows the ellipse. With one planet, both bodies go
round their centre of mass; with more, the star stands still.

A sequence of entries, pairs of tokens, is [time step, planet 1 .. planet k, star, planet 1 ..].
A position's x and y are each one of `bins` equal bins over [-50, 50] AU, positions beyond being
clipped; a time step is token `bins` or `bins` + 1, in both coordinates.

Every system is a pure function of (split, index), and making it takes less than training on it, so
nothing is stored: OrbitLoader makes the systems of a batch while the previous one is trained on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.loader import Batch, Batching, Ints, inputs_and_targets
from data.shards import Identity, Tokens
from data.simulated import SimulatedLoader, sequence_rng

G = 4 * np.pi**2  # AU^3 per year^2 and solar mass
EDGE = 50.0  # AU
TIME_STEPS = (7 * 0.0027, 180 * 0.0027)  # years: a week and half a year
PAIRS = 2  # the split of `draw_pair`, beside TRAINING and VALIDATION
# Systems with as many planets that are computed at once: their arrays fit a core's cache.
TOGETHER = 16

Floats = NDArray[np.float64]


class Elements(NamedTuple):
    """What determines a system of k planets; angles are in radians."""

    masses: Floats  # [k + 1], the star's last
    axes: Floats  # [k], semi-major, of the vector from star to planet
    eccentricities: Floats  # [k]
    tilts: Floats  # [k], of the major axis in the plane
    phases: Floats  # [k], mean anomalies at the first point
    centre: Floats  # [2], the centre of mass with one planet
    time_step: float


# ---- mechanics ----


def kepler(mean: Floats, eccentricity: Floats | float) -> Floats:
    """Solve Kepler's equation mean = E - e sin E for E, to 1e-14 within the first turns.

    Markley's solver (1995): a cubic's root and one correction of fifth order, without iterations.
    """
    e = np.asarray(eccentricity)
    turns = 2 * np.pi * np.rint(mean / (2 * np.pi))
    M = mean - turns
    M2 = M * M
    to_edge = np.pi**2 - np.pi * np.abs(M)
    alpha = (3 * np.pi**2 + 1.6 / (1 + e) * to_edge) / (np.pi**2 - 6)
    d = 3 * (1 - e) + alpha * e
    q = 2 * alpha * d * (1 - e) - M2
    r = (3 * alpha * d * (d - 1 + e) + M2) * M
    discriminant = q * q * q + r * r
    root = np.cbrt(np.abs(r) + np.sqrt(discriminant))
    w = np.square(root)
    cubic = 2 * r * w / (w * w + w * q + q * q)
    E = (cubic + M) / d
    # derivatives of E - e sin E - M
    f2 = e * np.sin(E)
    f3 = e * np.cos(E)
    f0 = E - f2 - M
    f1 = 1 - f3
    step = -f0 / (f1 - 0.5 * f0 * f2 / f1)
    step = -f0 / (f1 + step * (f2 / 2 + step * f3 / 6))
    slope = f1 + step * (f2 / 2 + step * (f3 / 6 - step * f2 / 24))
    return turns + E - f0 / slope


def positions(systems: Sequence[Elements], points: int) -> Floats:
    """Positions [systems, points, bodies, 2] of systems with the same number of planets."""
    by_element = [np.stack(values)[:, None] for values in zip(*systems, strict=True)]
    # masses are [systems, 1, bodies], a to phase [systems, 1, planets], time_step [systems, 1]
    masses, a, e, tilt, phase, centre, time_step = by_element
    planets = masses[:, :, :-1]
    star = masses[:, :, -1:]

    times = time_step[:, None] * np.arange(points)[:, None]  # [systems, points, 1]
    motion = np.sqrt(G * (planets + star) / a**3)  # radians a year, by Kepler's third law
    E = kepler(phase + motion * times, e)  # [systems, points, planets]
    along = a * (np.cos(E) - e)
    minor = a * np.sqrt(1 - e * e)  # semi-minor axes
    across = minor * np.sin(E)
    cos = np.cos(tilt)
    sin = np.sin(tilt)
    out = np.empty((len(systems), points, masses.shape[2], 2))
    vectors = out[:, :, :-1]  # from star to planet
    vectors[..., 0] = cos * along - sin * across
    vectors[..., 1] = sin * along + cos * across
    # the star's own orbit around the centre of mass; with several planets, the point at which its
    # orbit with the first one begins
    first = vectors[:, :, 0] if planets.shape[2] == 1 else vectors[:, :1, 0]
    lever = planets[:, :, :1] / (planets[:, :, :1] + star)
    out[:, :, -1] = centre - lever * first
    vectors += out[:, :, -1:]
    return out


# ---- systems ----


def draw(split: int, index: int, planets: int) -> Elements:
    """Draw a system of 1 to `planets` planets, all numbers equally likely."""
    rng = sequence_rng(split, index)
    count = int(rng.integers(1, planets + 1))
    # our fits of the exoplanet table of Vafa et al.: 4,460 planets and 4,956 stars
    planet_masses = 6.009815e-8 + rng.gamma(0.3202016, 1.105595e-3, count)
    star_mass = -0.6793606 + rng.lognormal(np.log(1.6271509), 0.2004501)
    planet_masses = np.clip(planet_masses, 1e-9, 1e-3)
    star_mass = np.clip(star_mass, 0.1, 5.0)
    return _draw_orbits(rng, np.append(planet_masses, star_mass))


def draw_pair(split: int, index: int) -> Elements:
    """Draw two bodies of masses within [0.0001, 0.0101], the lighter one the planet."""
    rng = sequence_rng(split, index)
    masses = np.sort(rng.uniform(1e-4, 1.01e-2, 2))
    return _draw_orbits(rng, masses)


def _draw_orbits(rng: np.random.Generator, masses: Floats) -> Elements:
    planets = len(masses) - 1
    return Elements(
        masses=masses,
        axes=rng.uniform(0.3, 32, planets),
        eccentricities=rng.beta(0.867, 3.03, planets),
        tilts=rng.uniform(0, 2 * np.pi, planets),
        phases=rng.uniform(0, 2 * np.pi, planets),
        centre=rng.standard_normal(2),
        time_step=TIME_STEPS[rng.integers(len(TIME_STEPS))],
    )


def simulated(systems: Sequence[Elements], entries: int) -> Iterator[tuple[list[int], Floats]]:
    """Yield groups of k systems: their indices in `systems`, and positions [k, points, bodies, 2].

    The systems of a group have equally many planets; the groups together are all systems.
    """
    by_planets: dict[int, list[int]] = {}
    for index, system in enumerate(systems):
        by_planets.setdefault(len(system.axes), []).append(index)
    for planets, indices in by_planets.items():
        points = math.ceil((entries - 1) / (planets + 1))
        for begin in range(0, len(indices), TOGETHER):
            group = indices[begin : begin + TOGETHER]
            yield group, positions([systems[index] for index in group], points)


# ---- sequences ----


def tokenise(systems: Sequence[Elements], bins: int, entries: int) -> Tokens:
    """The sequences [systems, entries, 2]; positions beyond +-50 AU are in the outermost bin."""
    tokens = np.empty((len(systems), entries, 2), dtype=np.uint16)
    for sequence, system in zip(tokens, systems, strict=True):
        sequence[0] = bins + TIME_STEPS.index(system.time_step)
    for group, at in simulated(systems, entries):
        points = at.reshape(len(group), -1, 2)[:, : entries - 1]
        bin_index = (points + EDGE) * (bins / (2 * EDGE))
        tokens[group, 1:] = np.clip(bin_index, 0, bins - 1)
    return tokens


class OrbitLoader(SimulatedLoader):
    """Batches of simulated systems, x, y being [b, block_size, 2]; an epoch sees each one once."""

    def __init__(self, systems: int, planets: int, bins: int, batching: Batching) -> None:
        self.planets = planets
        self.bins = bins
        count = "1 planet" if planets == 1 else f"1 to {planets} planets"
        self.source = f"simulated orbits of {count}"
        self.tokens = systems * batching.block_size
        super().__init__(systems, batching)

    def identity(self) -> Identity:
        return {"orbits": f"{self.source}, {self.n_windows} systems, {self.bins} bins"}

    def _simulate(self, split: int, indices: Ints, length: int) -> Batch:
        systems = [draw(split, int(index), self.planets) for index in indices]
        return inputs_and_targets(tokenise(systems, self.bins, length + 1), self.device)
