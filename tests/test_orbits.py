"""Simulated orbits: the mechanics against a numerical integration, the draws, the sequences."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import solve_ivp

from data import orbits
from data.loader import Batching
from data.orbits import G, OrbitLoader, draw, draw_pair, kepler, positions, simulated
from data.simulated import TRAINING
from errors import UserError

MANY = [draw(5, index, 10) for index in range(3000)]


def sequences(split, indices, planets=10, bins=7000, entries=1000):
    systems = [draw(split, index, planets) for index in indices]
    return orbits.tokenise(systems, bins, entries)


def places(system, entries=1000):
    """The bodies' positions in a sequence, [points, bodies, 2]."""
    ((_, at),) = simulated([system], entries)
    return at[0]


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
    (at,) = positions([system], 501)
    centre = (system.masses[:, None] * at).sum(1) / system.masses.sum()
    assert np.allclose(centre, system.centre, atol=1e-12)

    # velocities at the start: a derivative of eighth order
    step = 1e-4
    weights = [4 / 5, -1 / 5, 4 / 105, -1 / 280]
    (after,) = positions([replace(system, time_step=step)], 5)
    (before,) = positions([replace(system, time_step=-step)], 5)
    velocity = np.tensordot(weights, after[1:] - before[1:], 1) / step

    def pull(_, state):
        where, speed = state.reshape(2, 2, 2)
        vector = where[1] - where[0]
        pull = G * vector / np.linalg.norm(vector) ** 3
        return np.concatenate([speed.ravel(), star_mass * pull, -planet_mass * pull])

    solution = solve_ivp(
        pull,
        t_span=(0, 100 * period),
        y0=np.concatenate([at[0].ravel(), velocity.ravel()]),
        method="DOP853",
        t_eval=np.arange(501) * system.time_step,
        rtol=1e-13,
        atol=1e-13,
    )
    integrated = solution.y[:4].T.reshape(-1, 2, 2)
    assert np.abs(integrated - at).max() < 1e-6


def test_the_star_of_several_planets_stands_still_where_one_of_its_orbits_begins():
    system = next(system for system in MANY if len(system.axes) == 3)
    at = places(system)
    star = at[:, -1]
    assert at.shape == (250, 4, 2)
    assert (star == star[0]).all()
    first_planet = replace(
        system,
        masses=system.masses[[0, -1]],
        axes=system.axes[:1],
        eccentricities=system.eccentricities[:1],
        tilts=system.tilts[:1],
        phases=system.phases[:1],
    )
    (alone,) = positions([first_planet], 250)
    assert np.allclose(alone[0, 1], star[0], atol=1e-14)
    assert np.allclose(alone[:, 0] - alone[:, 1], at[:, 0] - star, atol=1e-12)


def test_a_system_depends_on_its_split_and_index_alone():
    together = sequences(5, range(40))
    for index, sequence in enumerate(together):
        (alone,) = sequences(5, [index])
        assert np.array_equal(sequence, alone)
    assert len({sequence.tobytes() for sequence in together}) == 40
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
    counts = np.bincount([len(system.axes) for system in MANY], minlength=11)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-4
    planets = np.concatenate([system.masses[:-1] for system in MANY])
    assert planets.min() >= 1e-9
    assert planets.max() == 1e-3
    stars = np.array([system.masses[-1] for system in MANY])
    assert stars.min() >= 0.1
    assert stars.max() <= 5
    assert_drawn_from(stats.gamma(0.3202016, 6.009815e-8, 1.105595e-3), planets[planets < 1e-3])
    assert_drawn_from(stats.lognorm(0.2004501, -0.6793606, 1.6271509), stars[stars > 0.1])
    assert_drawn_from(stats.uniform(0.3, 31.7), joined("axes"))
    assert_drawn_from(stats.beta(0.867, 3.03), joined("eccentricities"))
    assert_drawn_from(stats.uniform(0, 2 * np.pi), joined("tilts"))
    assert_drawn_from(stats.norm(), joined("centre"))
    steps = np.array([system.time_step for system in MANY])
    assert set(steps) == {7 * 0.0027, 180 * 0.0027}
    assert abs((steps > 0.1).mean() - 0.5) < 0.04


def test_pairs_are_drawn_with_the_lighter_body_first():
    masses = np.array([draw_pair(5, index).masses for index in range(1000)])
    assert (masses[:, 0] <= masses[:, 1]).all()
    assert masses.min() >= 1e-4
    assert masses.max() <= 1.01e-2
    assert abs(masses.mean() - 5.1e-3) < 3e-4


@pytest.mark.parametrize("bins", [500, 7000])
def test_a_sequence_is_a_time_step_and_the_bodies_in_turns(bins):
    wide = replace(MANY[0], axes=MANY[0].axes * 100)
    for system in (*MANY[:5], wide):
        (sequence,) = orbits.tokenise([system], bins, 1000)
        assert sequence.shape == (1000, 2)
        assert sequence.dtype == np.uint16
        step = bins + [7 * 0.0027, 180 * 0.0027].index(system.time_step)
        assert sequence[0].tolist() == [step, step]
        expected = places(system).reshape(-1, 2)[:999].clip(-50, 50)
        middles = (sequence[1:] + 0.5) * 100 / bins - 50
        assert np.abs(middles - expected).max() <= 50 / bins * (1 + 1e-9)
    # positions of the last, wide system are clipped
    assert sequence[1:].min() == 0
    assert sequence[1:].max() == bins - 1


def open_loader(systems=40, **more):
    return OrbitLoader(
        systems,
        planets=2,
        bins=500,
        batching=Batching(31, 8, seed=3, **more),
    )


def test_what_tells_systems_apart():
    identity = {"orbits": "simulated orbits of 1 to 2 planets, 40 systems, 500 bins"}
    assert open_loader().identity() == open_loader(rank=1, world_size=4).identity() == identity
    assert open_loader(systems=41).identity() != identity


def contents(batches):
    """Each system's tokens in these batches, as bytes."""
    return [system.numpy().tobytes() for x, _ in batches for system in x]


def test_batches_are_the_same_for_any_number_of_processes():
    whole = open_loader()
    ranks = [open_loader(rank=rank, world_size=4) for rank in range(4)]
    x, y = whole.batch(7)
    assert x.shape == y.shape == (8, 31, 2)
    assert (x[:, 1:] == y[:, :-1]).all()
    shares = [loader.batch(7)[0] for loader in ranks]
    assert (x == np.concatenate(shares)).all()
    first = int(whole._windows(7)[0])
    (sequence,) = sequences(TRAINING, [first], 2, 500, 32)
    assert (x[0].numpy() == sequence[:-1]).all()


def test_an_epoch_and_the_validation_have_each_system_once():
    loader = open_loader()
    epoch = contents(loader.batch(step) for step in range(5))
    assert len(set(epoch)) == 40
    validation = list(loader.validation_batches(10 * 31, 4))
    assert [len(x) for x, _ in validation] == [4, 4, 2]
    assert loader.validation_windows(319) == 10
    assert not set(contents(validation)) & set(epoch)
    shared = []
    for rank in range(4):
        share = open_loader(rank=rank, world_size=4).validation_batches(10 * 31, 4)
        shared += contents(share)
    assert sorted(shared) == sorted(contents(validation))


def test_too_few_systems_are_refused():
    with pytest.raises(UserError, match="val_tokens = 30, but one system takes 31"):
        open_loader().validation_batches(30, 4)
    with pytest.raises(UserError, match="1 to 2 planets: .* 4 windows .* one batch takes 8"):
        open_loader(systems=4)
