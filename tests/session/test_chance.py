"""One session's clock and chance, without any patching."""

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.session import chance, virtual_datetime
from dsec.session.chance import EPOCH_NS, Chance


@pytest.fixture(autouse=True)
def _inactive():
    yield
    chance.deactivate()


def draw(one: Chance) -> list:
    return [
        one.random.random(),
        one.random.gauss(0, 1),
        float(one.numpy.rand()),
        float(one.numpy.randn()),
        one.time_ns(),
        one.monotonic(),
        one.urandom(5),
        one.uuid_bytes(),
    ]


def test_the_seed_decides_everything():
    assert draw(Chance(3)) == draw(Chance(3))
    assert all(a != b for a, b in zip(draw(Chance(3))[:4], draw(Chance(4))[:4], strict=True))
    assert Chance(3).urandom(16) != Chance(4).urandom(16)
    assert Chance(3).urandom(16) != Chance(3).uuid_bytes()


def test_the_clock_starts_at_the_epoch_and_follows_the_position():
    one = Chance(1)
    assert one.time_ns() == EPOCH_NS + 1_000
    one.position = 5
    assert one.time_ns() == EPOCH_NS + 5_000_000_000 + 2_000
    one.sleep(0.5)
    assert one.now_s() == (EPOCH_NS + 5_500_000_000 + 3_000) / 1e9


@given(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 5), st.none()), max_size=50))
def test_the_clock_never_stands_or_goes_back(moves):
    one, last = Chance(1), 0
    for move in moves:
        if isinstance(move, int):
            one.position = move
        elif move is not None:
            one.sleep(move)
        now = one.time_ns()
        assert now > last
        last = now


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_sleep_refuses_what_time_sleep_refuses(bad):
    with pytest.raises(ValueError, match="non-negative"):
        Chance(1).sleep(bad)


@given(st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_a_restored_chance_continues_identically(seed, draws_before):
    one = Chance(seed)
    one.position = draws_before
    for _ in range(draws_before):
        draw(one)
    one.numpy.randn()  # leaves half a pair behind in numpy and in random
    one.random.gauss(0, 1)
    saved = pickle.loads(pickle.dumps(one.get_state()))
    expected = [draw(one) for _ in range(3)]
    other = Chance(0)
    other.set_state(saved)
    assert [draw(other) for _ in range(3)] == expected
    assert other.used == one.used


def test_a_snapshot_is_a_copy():
    one = Chance(1)
    draw(one)
    saved = one.get_state()
    expected = draw(one)
    one.numpy.rand(2000)
    other = Chance(1)
    other.set_state(saved)
    assert draw(other) == expected


def test_used_names_the_kinds_touched():
    one = Chance(1)
    assert one.used == set()
    draw(one)
    assert one.used == {"time", "random", "numpy", "uuid", "urandom"}


def test_the_slot_is_per_thread():
    import threading

    chance.activate(Chance(1))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(chance.current()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert chance.current() is not None


class TestDatetime:
    def test_now_is_virtual_in_a_session_and_real_outside(self):
        import datetime as real

        shim = virtual_datetime.module
        one = Chance(1)
        one.position = 3600
        chance.activate(one)
        assert str(shim.datetime.now())[:19] == "2020-01-01 01:00:00"
        assert str(shim.datetime.utcnow())[:19] == "2020-01-01 01:00:00"
        assert str(shim.datetime.today())[:19] == "2020-01-01 01:00:00"
        assert shim.date.today() == real.date(2020, 1, 1)
        tz = real.timezone(real.timedelta(hours=2))
        assert shim.datetime.now(tz).isoformat()[:19] == "2020-01-01T03:00:00"
        assert shim.datetime.now(tz).tzinfo is tz
        assert shim.datetime.fromtimestamp(0) == real.datetime(1970, 1, 1)
        chance.deactivate()
        assert shim.datetime.now().year > 2020
        assert shim.date.today().year > 2020

    def test_a_session_s_zone_is_utc_whatever_the_machine_s(self, monkeypatch):
        shim = virtual_datetime.module
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            chance.activate(Chance(1))
            assert shim.datetime.fromtimestamp(0).hour == 0
            assert shim.datetime.now().hour == 0
            assert shim.date.fromtimestamp(86_399).day == 1
            chance.deactivate()
            assert shim.datetime.fromtimestamp(0).hour == 9
        finally:
            monkeypatch.undo()
            time.tzset()

    def test_what_it_builds_is_real(self):
        import datetime as real

        shim = virtual_datetime.module
        built = [
            shim.datetime(2020, 1, 1),
            shim.datetime.now(),
            shim.datetime.strptime("2020", "%Y"),
            shim.datetime.fromisoformat("2020-01-01"),
            shim.datetime.min,
        ]
        assert {type(one) for one in built} == {real.datetime}
        assert type(shim.date.today()) is real.date
        assert pickle.loads(pickle.dumps(built)) == built

    def test_type_tests_agree_both_ways(self):
        import datetime as real

        shim = virtual_datetime.module
        assert isinstance(real.datetime(2020, 1, 1), shim.datetime)
        assert isinstance(real.datetime(2020, 1, 1), shim.date)
        assert not isinstance(real.date(2020, 1, 1), shim.datetime)
        assert issubclass(real.datetime, shim.datetime)
        assert issubclass(shim.datetime, real.datetime)
        assert issubclass(shim.datetime, shim.date)
        assert not issubclass(real.date, shim.datetime)
        assert shim.datetime == real.datetime
        assert pickle.loads(pickle.dumps(shim.datetime)) is shim.datetime

    def test_user_subclasses_stay_subclasses(self):
        shim = virtual_datetime.module

        class Mine(shim.datetime):
            pass

        chance.activate(Chance(1))
        assert type(Mine.now()) is Mine
        assert type(Mine(2020, 1, 1)) is Mine
        assert isinstance(Mine.now(), shim.datetime)
        assert not isinstance(shim.datetime.now(), Mine)

    def test_pydantic_takes_it_for_the_real_one(self):
        import pydantic

        shim = virtual_datetime.module
        model = pydantic.create_model("Model", at=(shim.datetime, ...), day=(shim.date, ...))
        assert model(at="2020-01-01T00:00:00", day="2020-01-01").at.year == 2020
