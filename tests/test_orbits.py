"""Simulated orbits: the mechanics against a numerical integration, the draws, the sequences."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import solve_ivp

from config import Config
from data import orbits
from data.loader import Batching
from data.orbits import G, OrbitLoader, draw, draw_pair, kepler, positions
from data.simulated import TRAINING
from data.tasks import fingerprint_of
from errors import UserError

MANY = [draw(5, index, 10) for index in range(3000)]
TIME_STEPS = [7 * 0.0027, 180 * 0.0027]


def sequences(split, indices, planets=10, bins=7000, entries=1000):
    systems = [draw(split, index, planets) for index in indices]
    return orbits.tokenise(systems, bins, entries)


def places(system, entries=1000):
    """The bodies' positions in a sequence, [points, bodies, 2]."""
    return positions(system, math.ceil((entries - 1) / len(system.masses)))


def test_kepler_solves_its_equation():
    mean = np.linspace(-4 * np.pi, 4 * np.pi, 8001)
    moderate = np.linspace(0, 0.99, 100)
    extreme = 1 - np.logspace(-3, -9, 13)
    eccentricity = np.concatenate([moderate, extreme])[:, None]
    E = kepler(mean, eccentricity)
    error = E - eccentricity * np.sin(E) - mean
    assert np.abs(error).max() < 1e-12


def test_a_numerical_integration_gives_the_same_orbit_over_a_hundred_periods():
    period = np.sqrt(1.3**3 / 1.1)  # Kepler's third law
    planet_mass = 0.2  # so heavy that the star moves too
    star_mass = 0.9
    system = orbits.Elements(
        masses=np.array([planet_mass, star_mass]),
        axes=np.array([1.3]),
        eccentricities=np.array([0.6]),
        tilts=np.array([0.7]),
        phases=np.array([2.0]),
        centre=np.array([3.0, -4.0]),
        time_step=period / 5,
    )
    at = positions(system, 501)
    moments = system.masses[:, None] * at
    centre = moments.sum(1) / system.masses.sum()
    assert np.allclose(centre, system.centre, atol=1e-12)

    # velocities at the start: a derivative of eighth order
    step = 1e-4
    weights = [4 / 5, -1 / 5, 4 / 105, -1 / 280]
    forwards = system._replace(time_step=step)
    backwards = system._replace(time_step=-step)
    after = positions(forwards, 5)
    before = positions(backwards, 5)
    velocity = np.tensordot(weights, after[1:] - before[1:], 1) / step

    def derivative(_, state):
        """The derivative of `state`, which is both bodies' positions and velocities."""
        (planet, star), velocities = state.reshape(2, 2, 2)
        vector = star - planet
        pull = G * vector / np.linalg.norm(vector) ** 3
        planet_acceleration = star_mass * pull
        star_acceleration = -planet_mass * pull
        return np.concatenate([velocities.ravel(), planet_acceleration, star_acceleration])

    first_state = np.concatenate([at[0].ravel(), velocity.ravel()])
    times = np.arange(501) * system.time_step
    solution = solve_ivp(
        derivative,
        t_span=(0, 100 * period),
        y0=first_state,
        method="DOP853",
        t_eval=times,
        rtol=1e-13,
        atol=1e-13,
    )
    integrated = solution.y[:4].T.reshape(-1, 2, 2)
    error = integrated - at
    assert np.abs(error).max() < 1e-6


def test_the_star_of_several_planets_stands_still_where_one_of_its_orbits_begins():
    system = next(system for system in MANY if len(system.axes) == 3)
    at = places(system)
    star = at[:, -1]
    assert at.shape == (250, 4, 2)
    assert (star == star[0]).all()
    first_planet = system._replace(
        masses=system.masses[[0, -1]],
        axes=system.axes[:1],
        eccentricities=system.eccentricities[:1],
        tilts=system.tilts[:1],
        phases=system.phases[:1],
    )
    alone = positions(first_planet, 250)
    planet_alone = alone[:, 0]
    star_alone = alone[:, 1]
    assert np.allclose(star_alone[0], star[0], atol=1e-14)
    assert np.allclose(planet_alone - star_alone, at[:, 0] - star, atol=1e-12)


def test_a_system_depends_on_its_split_and_index_alone():
    together = sequences(5, range(40))
    for index, sequence in enumerate(together):
        (alone,) = sequences(5, [index])
        assert np.array_equal(sequence, alone)
    distinct = {sequence.tobytes() for sequence in together}
    assert len(distinct) == 40
    (other_split,) = sequences(6, [0])
    assert not np.array_equal(together[0], other_split)


def assert_drawn_from(law, values):
    """Values of what was cut off at a limit: the rest has the same law, up to the limit."""
    low = law.cdf(values.min())
    high = law.cdf(values.max())
    shares = (law.cdf(values) - low) / (high - low)
    assert stats.kstest(shares, "uniform").pvalue > 1e-4, law.dist.name


def joined(element):
    return np.concatenate([getattr(system, element) for system in MANY])


def test_the_draws_are_distributed_as_documented():
    planets_of_systems = [len(system.axes) for system in MANY]
    counts = np.bincount(planets_of_systems, minlength=11)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-4

    planets = np.concatenate([system.masses[:-1] for system in MANY])
    assert planets.min() >= 1e-9
    assert planets.max() == 1e-3
    law_of_planets = stats.gamma(0.3202016, 6.009815e-8, 1.105595e-3)
    assert_drawn_from(law_of_planets, planets[planets < 1e-3])

    stars = np.array([system.masses[-1] for system in MANY])
    assert stars.min() >= 0.1
    assert stars.max() <= 5
    law_of_stars = stats.lognorm(0.2004501, -0.6793606, 1.6271509)
    assert_drawn_from(law_of_stars, stars[stars > 0.1])

    for element, law in (
        ("axes", stats.uniform(0.3, 31.7)),
        ("eccentricities", stats.beta(0.867, 3.03)),
        ("tilts", stats.uniform(0, 2 * np.pi)),
        ("phases", stats.uniform(0, 2 * np.pi)),
        ("centre", stats.norm()),
    ):
        assert stats.kstest(joined(element), law.cdf).pvalue > 1e-4, element

    steps = np.array([system.time_step for system in MANY])
    assert set(steps) == set(TIME_STEPS)
    share_of_long_steps = (steps > 0.1).mean()
    assert abs(share_of_long_steps - 0.5) < 0.04


def test_pairs_are_drawn_with_the_lighter_body_first():
    masses = np.array([draw_pair(5, index).masses for index in range(1000)])
    lighter = masses[:, 0]
    heavier = masses[:, 1]
    assert (lighter <= heavier).all()
    assert masses.min() >= 1e-4
    assert masses.max() <= 1.01e-2
    assert abs(masses.mean() - 5.1e-3) < 3e-4


@pytest.mark.parametrize("bins", [500, 7000])
def test_a_sequence_is_a_time_step_and_the_bodies_in_turns(bins):
    wide = MANY[0]._replace(axes=MANY[0].axes * 100)
    for system in (*MANY[:5], wide):
        (sequence,) = orbits.tokenise([system], bins, 1000)
        assert sequence.shape == (1000, 2)
        assert sequence.dtype == np.uint16
        time_step = sequence[0]
        id_of_step = bins + TIME_STEPS.index(system.time_step)
        assert time_step.tolist() == [id_of_step, id_of_step]
        bins_of_bodies = sequence[1:]
        middles = (bins_of_bodies + 0.5) * 100 / bins - 50
        bodies = places(system).reshape(-1, 2)[:999]
        error = middles - bodies.clip(-50, 50)
        half_a_bin = 50 / bins
        assert np.abs(error).max() <= half_a_bin * (1 + 1e-9)
    # positions of the last, wide system are clipped
    assert bins_of_bodies.min() == 0
    assert bins_of_bodies.max() == bins - 1


def open_loader(systems=40, **more):
    return OrbitLoader(
        systems,
        planets=2,
        bins=500,
        batching=Batching(31, 8, seed=3, **more),
    )


def test_what_tells_systems_apart():
    fingerprint = {"orbits": "simulated orbits of 1 to 2 planets, 40 systems, 500 bins"}
    config = Config(task="orbits", tie_embeddings=False, systems=40, planets=2, bins=500)
    assert fingerprint_of(config) == fingerprint
    assert fingerprint_of(config.replace(systems=41)) != fingerprint


def contents(batches):
    """Each system's tokens in these batches, as bytes."""
    systems = []
    for x, _ in batches:
        systems += [system.numpy().tobytes() for system in x]
    return systems


def test_batches_are_the_same_for_any_number_of_processes():
    whole = open_loader()
    ranks = [open_loader(rank=rank, world_size=4) for rank in range(4)]
    x, y = whole.batch(7)
    assert x.shape == (8, 31, 2)
    assert y.shape == (8, 31, 2)
    assert (x[:, 1:] == y[:, :-1]).all()
    shares = []
    for loader in ranks:
        share, _ = loader.batch(7)
        shares.append(share)
    assert (x == np.concatenate(shares)).all()
    first_system = int(whole._sequences(7)[0])
    (sequence,) = sequences(TRAINING, [first_system], 2, 500, 32)
    assert (x[0].numpy() == sequence[:-1]).all()


def test_an_epoch_and_the_validation_have_each_system_once():
    loader = open_loader()
    epoch = contents(loader.batch(step) for step in range(5))
    assert len(set(epoch)) == 40
    batches = list(loader.validation_batches(10 * 31, 4))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert loader.validation_sequences(319) == 10
    validation = contents(batches)
    assert set(validation).isdisjoint(epoch)
    shared = []
    for rank in range(4):
        loader_of_rank = open_loader(rank=rank, world_size=4)
        shared += contents(loader_of_rank.validation_batches(10 * 31, 4))
    assert sorted(shared) == sorted(validation)


def test_too_few_systems_are_refused():
    loader = open_loader()
    with pytest.raises(
        UserError, match="1 to 2 planets: val_tokens = 30 leaves 30 .* sequence of 31"
    ):
        loader.validation_batches(30, 4)
    says = "1 to 2 planets: .* 7 sequences .* the 8 of a step .*; set systems to at least 8"
    with pytest.raises(UserError, match=says):
        open_loader(systems=7)
    open_loader(systems=8)
