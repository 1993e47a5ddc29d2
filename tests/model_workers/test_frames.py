from dataclasses import asdict

from model_workers import frames
from model_workers.engine.protocol import Load


def test_every_number_of_the_load_is_passed_on() -> None:
    load = Load(*range(1, 11))
    message = frames.load(load)
    assert {name: getattr(message, name) for name in asdict(load)} == asdict(load)
