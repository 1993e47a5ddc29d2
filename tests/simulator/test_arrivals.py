"""Generated traffic has the rate, the shape and the lengths that it was asked for."""

import statistics

import pytest

from simulator.arrivals import MIXES, Lognormal, generate, parse_stream
from simulator.trace import Arrival, SimulationError


def trace(*texts: str, seconds: float = 1000.0, seed: int = 1) -> list[Arrival]:
    return generate([parse_stream(text) for text in texts], seconds, seed)


def counts(arrivals: list[Arrival], bucket_s: float, seconds: float) -> list[int]:
    found = [0] * int(seconds / bucket_s)
    for arrival in arrivals:
        found[int(arrival.at_s / bucket_s)] += 1
    return found


@pytest.mark.parametrize("kind", ["poisson", "bursty", "diurnal"])
def test_the_mean_rate_is_what_was_asked_for(kind: str) -> None:
    extra = ",period_s=100" if kind == "diurnal" else ""
    arrivals = trace(f"{kind}:rate=20{extra}", seconds=1000.0)
    assert len(arrivals) / 1000.0 == pytest.approx(20.0, rel=0.1)
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)


def test_bursts_vary_more_than_poisson() -> None:
    def dispersion(text: str) -> float:
        found = counts(trace(text), 1.0, 1000.0)
        return statistics.variance(found) / statistics.mean(found)

    assert dispersion("poisson:rate=20") == pytest.approx(1.0, abs=0.25)
    assert dispersion("bursty:rate=20") > 10


def test_a_day_has_its_night_first_and_its_peak_at_noon() -> None:
    found = counts(trace("diurnal:rate=20,period_s=1000,swing=0.8"), 100.0, 1000.0)
    assert found[0] < 1000 < found[4]
    assert found[4] / found[0] > 4


def test_a_flood_comes_at_once_beside_others() -> None:
    arrivals = trace(
        "flood:count=50,class=bulk,start_s=5", "poisson:rate=1,class=interactive,tenant=a"
    )
    bulk = [a for a in arrivals if a.priority_class == "bulk"]
    assert [a.at_s for a in bulk] == [5.0] * 50
    assert {a.tenant for a in arrivals if a.priority_class == "interactive"} == {"a"}


def test_lengths_follow_the_stream() -> None:
    arrivals = trace("poisson:rate=5,prompt=lognormal/200/1/4096,answer=uniform/5/9,max_tokens=7")
    prompts = [a.prompt_tokens for a in arrivals]
    assert statistics.median(prompts) == pytest.approx(200, rel=0.1)
    assert max(prompts) <= 4096
    assert {a.answer_tokens for a in arrivals} == {5, 6, 7}
    assert {a.max_tokens for a in arrivals} == {7}


@pytest.mark.parametrize(("name", "prompt", "answer"), [("sharegpt", 161, 338), ("alpaca", 19, 58)])
def test_a_mix_has_the_means_of_its_source(name: str, prompt: float, answer: float) -> None:
    arrivals = trace(f"poisson:rate=20,lengths={name}")
    assert statistics.mean(a.prompt_tokens for a in arrivals) == pytest.approx(prompt, rel=0.06)
    assert statistics.mean(a.answer_tokens for a in arrivals) == pytest.approx(answer, rel=0.06)
    assert isinstance(MIXES[name].prompt, Lognormal)


def test_the_seed_decides() -> None:
    assert trace("poisson:rate=5", seed=1) == trace("poisson:rate=5", seed=1)
    assert trace("poisson:rate=5", seed=1) != trace("poisson:rate=5", seed=2)
    first, second = parse_stream("poisson:rate=5"), parse_stream("poisson:rate=5")
    both = generate([first, second], 100.0, 1)
    assert len({a.at_s for a in both}) == len(both), "streams of one seed differ"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weekly:rate=1", "no arrivals 'weekly'"),
        ("poisson", "rate is missing"),
        ("poisson:rate", "'rate' is not key=value"),
        ("poisson:rate=0", "rate: '0': Input should be greater than 0"),
        ("poisson:rate=inf", "rate: 'inf': Input should be a finite number"),
        ("poisson:rate=-1", "rate: '-1': Input should be greater than 0"),
        (
            "poisson:rate=1,class=urgent",
            "class: 'urgent': String should match pattern '^(interactive|standard|bulk)$'",
        ),
        ("poisson:rate=1,lengths=long", "lengths: 'long': Input should be 'sharegpt', 'alpaca'"),
        ("poisson:rate=1,prompt=0", "'0' is no length"),
        ("poisson:rate=1,prompt=lognormal/200", "'lognormal/200' is no length"),
        ("poisson:rate=1,prompt=lognormal/5/1/inf", "'lognormal/5/1/inf' is no length"),
        ("poisson:rate=1,prompt=uniform/1/inf", "'uniform/1/inf' is no length"),
        ("poisson:rate=1,colour=red", "colour: 'red': Extra inputs are not permitted"),
        ("diurnal:rate=1,swing=2", "swing: '2': Input should be less than or equal to 1"),
        ("flood:count=1.5", "count: '1.5': Input should be a valid integer"),
    ],
)
def test_a_stream_that_cannot_be_is_told(text: str, said: str) -> None:
    with pytest.raises(SimulationError) as raised:
        parse_stream(text)
    assert said in str(raised.value)


def test_nothing_arriving_is_told() -> None:
    with pytest.raises(SimulationError, match="nothing arrives"):
        trace("poisson:rate=1e-9", seconds=1.0)
