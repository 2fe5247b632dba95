"""Simulated planets around a star.

A system has 1 to 10 planets in a plane. Each goes round the star on a Kepler ellipse, and planets
do not pull each other (Vafa et al. 2025, "What has a foundation model found?"). The orbital
elements are drawn from fits of the known exoplanets. Units are AU, years and solar masses, so
G = 4 pi^2. The vector from star to planet follows the ellipse. With one planet, both bodies go
round their centre of mass; with more, the star stands still.

A sequence of entries, pairs of tokens, is [time step, planet 1 .. planet k, star, planet 1 ..].
A position's x and y are each one of `bins` equal bins over [-50, 50] AU, positions beyond being
clipped; a time step is token `bins` or `bins` + 1, in both coordinates.

Every system is a pure function of (split, index), and making it takes less than training on it, so
nothing is stored: OrbitLoader makes the systems of a batch while the previous one is trained on.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.loader import Batch, Batching, Ints, inputs_and_targets
from data.shards import Fingerprint, Tokens
from data.simulated import SimulatedLoader, sequence_rng

G = 4 * np.pi**2  # AU^3 per year^2 and solar mass
EDGE = 50.0  # AU
TIME_STEPS = (7 * 0.0027, 180 * 0.0027)  # years: a week and half a year
PAIRS = 2  # the split of `draw_pair`, besides TRAINING and VALIDATION

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


def kepler(mean: Floats, e: Floats | float) -> Floats:
    """Solve Kepler's equation mean = E - e sin E for E, to 1e-14 within the first turns.

    Halley's method starts at M + 0.85 e sign M (Danby 1987). Orbits take 3 to 5 steps, but
    16 with 1 - e = 1e-9.
    """
    turns = 2 * np.pi * np.rint(mean / (2 * np.pi))
    M = mean - turns
    E = M + 0.85 * e * np.sign(M)
    for _ in range(20):
        second = e * np.sin(E)  # the second derivative of E - e sin E - M
        slope = 1 - e * np.cos(E)
        error = E - second - M
        step = error / (slope - 0.5 * error * second / slope)
        E -= step
        if np.abs(step).max() < 1e-5:  # convergence is cubic: only rounding is left
            break
    return turns + E


def positions(system: Elements, points: int) -> Floats:
    """Positions [points, bodies, 2] of the bodies of a system."""
    masses, a, e, tilt, phase, centre, time_step = system
    planets = masses[:-1]
    star = masses[-1]

    times = time_step * np.arange(points)[:, None]
    motion = np.sqrt(G * (planets + star) / a**3)  # radians a year, by Kepler's third law
    E = kepler(phase + motion * times, e)  # [points, planets]
    along = a * (np.cos(E) - e)
    minor = a * np.sqrt(1 - e * e)  # semi-minor axes
    across = minor * np.sin(E)
    cos = np.cos(tilt)
    sin = np.sin(tilt)
    out = np.empty((points, len(masses), 2))
    vectors = out[:, :-1]  # from star to planet
    vectors[..., 0] = cos * along - sin * across
    vectors[..., 1] = sin * along + cos * across
    # the star's own orbit around the centre of mass; with several planets, the point at which its
    # orbit with the first one begins
    first = vectors[:, 0] if len(planets) == 1 else vectors[0, 0]
    out[:, -1] = centre - planets[0] / (planets[0] + star) * first
    vectors += out[:, -1:]
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


# ---- sequences ----


def tokenise(systems: Sequence[Elements], bins: int, entries: int) -> Tokens:
    """The sequences [systems, entries, 2]; positions beyond +-50 AU are in the outermost bin."""
    tokens = np.empty((len(systems), entries, 2), dtype=np.uint16)
    for sequence, system in zip(tokens, systems, strict=True):
        sequence[0] = bins + TIME_STEPS.index(system.time_step)
        points = math.ceil((entries - 1) / len(system.masses))
        at = positions(system, points).reshape(-1, 2)[: entries - 1]
        bin_index = (at + EDGE) * (bins / (2 * EDGE))
        sequence[1:] = np.clip(bin_index, 0, bins - 1)
    return tokens


def source_of(planets: int) -> str:
    count = "1 planet" if planets == 1 else f"1 to {planets} planets"
    return f"simulated orbits of {count}"


def fingerprint_of(systems: int, planets: int, bins: int) -> Fingerprint:
    """Return what identifies simulated systems, each drawn by its index."""
    return {"orbits": f"{source_of(planets)}, {systems} systems, {bins} bins"}


class OrbitLoader(SimulatedLoader):
    """Batches of simulated systems, x, y being [b, block_size, 2]; an epoch sees each one once."""

    def __init__(self, systems: int, planets: int, bins: int, batching: Batching) -> None:
        self.planets = planets
        self.bins = bins
        self.source = source_of(planets)
        self.tokens = systems * batching.block_size
        self.needed = f"set systems to at least {batching.sequences_per_step}"
        super().__init__(systems, batching)

    def _simulate(self, split: int, indices: Ints, length: int) -> Batch:
        systems = [draw(split, int(index), self.planets) for index in indices]
        return inputs_and_targets(tokenise(systems, self.bins, length + 1))
