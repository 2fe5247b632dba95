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


def sequences(seed, indices, planets=10, bins=7000, entries=1000):
    return orbits.tokenise([draw(seed, index, planets) for index in indices], bins, entries)


def places(system, entries=1000):
    """The bodies' positions in a sequence, [points, bodies, 2]."""
    ((_, at),) = simulated([system], entries)
    return at[0]


def test_kepler_solves_its_equation():
    mean = np.linspace(-4 * np.pi, 4 * np.pi, 8001)
    eccentricity = np.concatenate([np.linspace(0, 0.99, 100), 1 - np.logspace(-3, -9, 13)])[:, None]
    E = kepler(mean, eccentricity)
    assert np.abs(E - eccentricity * np.sin(E) - mean).max() < 1e-12


def test_a_numerical_integration_gives_the_same_orbit_over_a_hundred_periods():
    period = np.sqrt(1.3**3 / 1.1)  # Kepler's third law
    system = orbits.Elements(  # the planet is so heavy that the star moves too
        masses=np.array([0.2, 0.9]), axes=np.array([1.3]), eccentricities=np.array([0.6]),
        tilts=np.array([0.7]), phases=np.array([2.0]), centre=np.array([3.0, -4.0]),
        time_step=period / 5,
    )  # fmt: skip
    (at,) = positions([system], 501)
    centre = (system.masses[:, None] * at).sum(1) / system.masses.sum()
    assert np.allclose(centre, system.centre, atol=1e-12)
    step, weights = 1e-4, [4 / 5, -1 / 5, 4 / 105, -1 / 280]  # a derivative of eighth order
    after, before = (positions([replace(system, time_step=t)], 5)[0, 1:] for t in (step, -step))
    velocity = np.tensordot(weights, after - before, 1) / step

    def pull(_, state):
        where, speed = state.reshape(2, 2, 2)
        vector = where[1] - where[0]
        pull = G * vector / np.linalg.norm(vector) ** 3
        return np.concatenate([speed.ravel(), system.masses[1] * pull, -system.masses[0] * pull])

    solution = solve_ivp(
        pull, (0, 100 * period), np.concatenate([at[0].ravel(), velocity.ravel()]),
        method="DOP853", t_eval=np.arange(501) * system.time_step, rtol=1e-13, atol=1e-13,
    )  # fmt: skip
    assert np.abs(solution.y[:4].T.reshape(-1, 2, 2) - at).max() < 1e-6


def test_the_star_of_several_planets_stands_still_where_one_of_its_orbits_begins():
    one = next(one for one in MANY if len(one.axes) == 3)
    at = places(one)
    assert at.shape == (250, 4, 2) and (at[:, -1] == at[0, -1]).all()
    first = replace(
        one, masses=one.masses[[0, -1]],
        **{name: getattr(one, name)[:1] for name in ("axes", "eccentricities", "tilts", "phases")},
    )  # fmt: skip
    (alone,) = positions([first], 250)
    assert np.allclose(alone[0, 1], at[0, -1], atol=1e-14)
    assert np.allclose(alone[:, 0] - alone[:, 1], at[:, 0] - at[:, -1], atol=1e-12)


def test_a_system_depends_on_its_seed_and_index_alone():
    together = sequences(5, range(40))
    assert all(np.array_equal(together[i], sequences(5, [i])[0]) for i in range(40))
    assert len({sequence.tobytes() for sequence in together}) == 40
    assert not np.array_equal(together[0], sequences(6, [0])[0])


def test_the_draws_are_distributed_as_documented():
    planets = np.concatenate([one.masses[:-1] for one in MANY])
    stars = np.array([one.masses[-1] for one in MANY])
    counts = np.bincount([len(one.axes) for one in MANY], minlength=11)
    assert counts[0] == 0 and stats.chisquare(counts[1:]).pvalue > 1e-4
    assert planets.min() >= 1e-9 and planets.max() == 1e-3
    assert stars.min() >= 0.1 and stars.max() <= 5
    samples = {
        stats.gamma(0.3202016, 6.009815e-8, 1.105595e-3): planets[planets < 1e-3],
        stats.lognorm(0.2004501, -0.6793606, 1.6271509): stars[stars > 0.1],
        stats.uniform(0.3, 31.7): np.concatenate([one.axes for one in MANY]),
        stats.beta(0.867, 3.03): np.concatenate([one.eccentricities for one in MANY]),
        stats.uniform(0, 2 * np.pi): np.concatenate([one.tilts for one in MANY]),
        stats.norm(): np.concatenate([one.centre for one in MANY]),
    }
    for law, values in samples.items():
        # of what was cut off at a limit the rest has the same law, up to there
        low, high = law.cdf([values.min(), values.max()])
        shares = (law.cdf(values) - low) / (high - low)
        assert stats.kstest(shares, "uniform").pvalue > 1e-4, law.dist.name
    steps = np.array([one.time_step for one in MANY])
    assert set(steps) == {7 * 0.0027, 180 * 0.0027} and abs((steps > 0.1).mean() - 0.5) < 0.04
    pairs = np.array([draw_pair(5, index).masses for index in range(1000)])
    assert (pairs[:, 0] <= pairs[:, 1]).all() and pairs.min() >= 1e-4 and pairs.max() <= 1.01e-2
    assert abs(pairs.mean() - 5.1e-3) < 3e-4


@pytest.mark.parametrize("bins", [500, 7000])
def test_a_sequence_is_a_time_step_and_the_bodies_in_turns(bins):
    for system in (*MANY[:5], replace(MANY[0], axes=MANY[0].axes * 100)):
        (sequence,) = orbits.tokenise([system], bins, 1000)
        assert sequence.shape == (1000, 2) and sequence.dtype == np.uint16
        step = bins + [7 * 0.0027, 180 * 0.0027].index(system.time_step)
        assert sequence[0].tolist() == [step, step]
        expected = places(system).reshape(-1, 2)[:999].clip(-50, 50)
        middles = (sequence[1:] + 0.5) * 100 / bins - 50
        assert np.abs(middles - expected).max() <= 50 / bins * (1 + 1e-9)
    assert sequence[1:].min() == 0 and sequence[1:].max() == bins - 1  # positions are clipped


def test_batches_are_the_same_for_any_number_of_processes():
    def loader(systems=40, **more):
        return OrbitLoader(systems, 2, 500, Batching(31, 8, seed=3, **more))

    whole = loader()
    x, y = whole.batch(7)
    assert x.shape == y.shape == (8, 31, 2) and (x[:, 1:] == y[:, :-1]).all()
    parts = [loader(rank=rank, world_size=4) for rank in range(4)]
    assert (x == np.concatenate([part.batch(7)[0] for part in parts])).all()
    system = int(whole._windows(7)[0])
    assert (x[0].numpy() == sequences(TRAINING, [system], 2, 500, 32)[0, :-1]).all()
    epoch = [system.numpy().tobytes() for step in range(5) for system in whole.batch(step)[0]]
    assert len(set(epoch)) == 40
    validation = list(whole.validation_batches(10 * 31, 4))
    assert [len(x) for x, _ in validation] == [4, 4, 2] and whole.validation_windows(319) == 10
    shares = [part.validation_batches(10 * 31, 4) for part in parts]
    assert sum(len(x) for share in shares for x, _ in share) == 10
    assert not {system.numpy().tobytes() for x, _ in validation for system in x} & set(epoch)
    with pytest.raises(UserError, match="val_tokens = 30, but one system takes 31"):
        whole.validation_batches(30, 4)
    with pytest.raises(UserError, match="1 to 2 planets: .* 4 windows .* one batch takes 8"):
        loader(systems=4)
