"""Which engine a worker builds."""

import sys

import pytest

from model_workers import process
from sluice import interpreter
from sluice.settings import ModelSettings, SettingsError


def test_shipped_models_load_without_encoder_decoder_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That code needs transformers, whose import takes longer than all the rest of a start."""
    monkeypatch.setitem(sys.modules, "model_workers.engine.encoder_decoder", None)
    monkeypatch.setattr("model_workers.engine.checkpoint.limit_threads", lambda threads: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    settings = ModelSettings(name="m", path="builtin:small", device="cpu", cache_gb=0.01)
    engine = process.build_engine(settings, lambda: None)
    assert not engine.has_sequences()


def test_the_sender_of_reports_waits_for_no_engine_in_python() -> None:
    before = sys.getswitchinterval()
    try:
        process.build_engine(ModelSettings(name="m", path=".", engine="echo"), lambda: None)
        assert sys.getswitchinterval() == pytest.approx(interpreter.SWITCH_S)
    finally:
        sys.setswitchinterval(before)
    assert interpreter.SWITCH_S <= 0.001


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SettingsError("its context is too long"), "models: m: its context is too long"),
        (OSError("no such file.\nSee the log."), "models: m: no such file"),
    ],
)
def test_what_keeps_an_engine_from_loading_names_the_model(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    def load_engine(*_: object) -> None:
        raise raised

    monkeypatch.setattr("model_workers.engine.checkpoint.load_engine", load_engine)
    monkeypatch.setattr("model_workers.engine.checkpoint.limit_threads", lambda threads: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    with pytest.raises(SettingsError) as refused:
        process.build_engine(
            ModelSettings(name="m", path="builtin:small", device="cpu"), lambda: None
        )
    assert str(refused.value) == said
