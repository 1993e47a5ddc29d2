"""Who is refused, who is sent elsewhere, and what the wait is taken to be between two reports."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import overload
from gateway.routing.router import Plan
from gateway.streaming.load_table import ModelLoadTable
from sluice.errors import ExpectedLate, ModelUnavailable
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerRules
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY, RouteStrategy
from sluice.wire.subjects import RANKS

RULES = overload.OverloadRules(
    BreakerRules(failures=1),
    fallbacks={"large": ("medium", "small")},
    models={
        name: ModelSettings(name=name, path=name, tier=name[0])
        for name in ("large", "medium", "small")
    },
)
TOKENS_PER_S = 100.0
SERVICE_S = 1.0
"""Of an answer of one token, of which more is not known."""


class Scene:
    """Two models with one batcher; ``now`` is the time of the last report."""

    def __init__(self) -> None:
        self.now = 10.0
        self.loads = ModelLoadTable()
        self.overload = overload.OverloadControl(self.loads, ())
        self.breakers = self.overload.breakers

    def report(self, batcher: str = "b1", **waits_s: float) -> None:
        """Expected waits of standard tasks by model; twenty tokens each. 0: a slot is free."""
        models = [
            ModelReport(
                model=model,
                workers=1,
                tokens_per_s=TOKENS_PER_S,
                classes=[
                    ClassReport(
                        priority_class="standard",
                        queued=int(wait_s * 5),
                        queued_tokens=int(wait_s * 100),
                        expected_wait_ms=wait_s * 1e3,
                        free_rows=0 if wait_s else 1,
                        first_token_ms=SERVICE_S * 1e3,
                        token_ms=100.0,
                    )
                ],
            )
            for model, wait_s in waits_s.items()
        ]
        self.loads.update(BatcherReport(batcher=batcher, models=models), self.now)

    def send(self, tasks: int, priority_class: str = "standard", tenant: str = "") -> None:
        """Tasks that this gateway sends right after the report."""
        for _ in range(tasks):
            self.overload.sent("large", "large", priority_class, 20, self.now + 0.1, tenant)

    def choose(
        self,
        timeout_s: float,
        *,
        allow: bool = False,
        after_s: float = 0.0,
        strategy: RouteStrategy.ValueType = ROUTE_STRATEGY_PINNED,
    ) -> Plan:
        now = self.now + after_s
        scheduling = overload.SchedulingParams("standard", now + timeout_s, allow, rules=RULES)
        plan = Plan(strategy, "asked for", [RULES.models["large"]], {"large": "asked for"}, {})
        problem = self.overload.outlook("large", scheduling, now).problem
        if problem is not None and not self.overload.degrade(plan, problem, scheduling, now):
            raise problem
        return plan


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("report", "sent", "timeout_s", "chosen"),
    [
        ({"large": 2.0}, "", 3.1, "large"),
        ({"large": 0.0}, "", 0.01, "large"),
        ({"large": 1.0}, "bulk", 2.6, "large"),
        ({"small": 0.1}, "", 3.0, "small"),
        ({}, "", 3.0, ModelUnavailable),
        ({"large": 4.0}, "", -0.001, ExpectedLate),
    ],
    ids=["in time", "free slot", "less urgent before", "no worker", "none at all", "past"],
)
def test_the_model_is_that_which_answers_in_time(
    scene: Scene, report: dict[str, float], sent: str, timeout_s: float, chosen: Any
) -> None:
    answer(scene, *[1] * overload.ANSWERS_MIN)
    scene.report(**report)
    scene.send(100 if sent else 0, sent or "standard")
    scene.now += 0.2
    if isinstance(chosen, str):
        assert scene.choose(timeout_s, allow=True).model == chosen
    else:
        with pytest.raises(chosen, match=r"no worker|deadline: 0\.0 s left"):
            scene.choose(timeout_s)


def test_flooding_tenant_leaves_others_their_wait(scene: Scene) -> None:
    def class_of(wait_s: float, **tenants_s: float) -> ClassReport:
        return ClassReport(
            priority_class="standard",
            queued=10,
            expected_wait_ms=1e3 * wait_s,
            first_token_ms=SERVICE_S * 1e3,
            tenant_wait_ms={name: 1e3 * one for name, one in tenants_s.items()},
        )

    for batcher, entry in (("b1", class_of(0.5, loud=60.0)), ("b2", class_of(0.5, loud=20.0))):
        model = ModelReport(model="large", workers=1, tokens_per_s=TOKENS_PER_S, classes=[entry])
        scene.loads.update(BatcherReport(batcher=batcher, models=[model]), scene.now)
    for tenant, wait_s, is_late in (("loud", 40.0, True), ("quiet", 0.5, False)):
        scheduling = overload.SchedulingParams("standard", scene.now + 10.0, tenant=tenant)
        assert scene.overload.outlook("large", scheduling, scene.now).wait_s == pytest.approx(
            wait_s
        )
        problem = scene.overload.outlook("large", scheduling, scene.now).problem
        assert isinstance(problem, ExpectedLate) is is_late


def test_late_request_is_refused_with_retry_time(scene: Scene) -> None:
    scene.report(large=4.0)
    with pytest.raises(ExpectedLate) as caught:
        scene.choose(3.0)
    retry_s = 5.0 - 3.0 / overload.SURE_SHARE
    assert caught.value.message == (
        "deadline: 3.0 s left, about 5.0 s expected of large (400 tokens before it at 100 tokens/s);"
        f" retry in {retry_s:.1f} s or raise the timeout"
    )
    assert caught.value.retry_after_s == pytest.approx(retry_s)
    assert scene.choose(5.1).model == "large"


def test_first_fallback_in_time_answers_if_allowed(scene: Scene) -> None:
    scene.report(large=9.0, medium=9.0, small=0.1)
    plan = scene.choose(3.0, allow=True)
    assert (plan.model, plan.candidates[0].tier, plan.degraded) == ("small", "s", True)
    assert plan.reason == (
        "asked for; degraded: deadline: 3.0 s left, about 10.0 s expected of large"
        " (900 tokens before it at 100 tokens/s)"
    )
    with pytest.raises(ExpectedLate, match="large"):
        scene.choose(3.0)


def test_where_safety_sends_a_request_it_stays(scene: Scene) -> None:
    scene.report(large=9.0, small=0.0)
    with pytest.raises(ExpectedLate):
        scene.choose(3.0, allow=True, strategy=ROUTE_STRATEGY_SAFETY)


def test_wait_grows_with_sent_tasks_and_shrinks_with_time(scene: Scene) -> None:
    scene.report(large=1.0)
    assert scene.choose(2.6).model == "large"
    # Ten tasks of twenty tokens are two seconds of work.
    scene.send(10)
    with pytest.raises(ExpectedLate) as caught:
        scene.choose(2.5, after_s=0.5)
    wait_s = 1.0 + 2.0 - 0.5
    assert caught.value.retry_after_s == pytest.approx(
        wait_s + SERVICE_S - 2.5 / overload.SURE_SHARE
    )
    assert scene.choose(2.6, after_s=2.0).model == "large"


def test_sent_tasks_are_dropped_without_a_query(scene: Scene) -> None:
    for _ in range(100):
        scene.report(large=1.0)
        scene.send(1)
        scene.now += 1.0
    assert len(scene.overload.sent_tokens["large"]) <= 2


def test_batchers_share_the_work(scene: Scene) -> None:
    scene.report("b1", large=4.0)
    scene.report("b2", large=0.0)
    load = scene.loads.load("large", scene.now)
    assert load.tokens_per_s == 2 * TOKENS_PER_S
    assert load.classes["standard"].wait_s == 2.0


def test_request_is_hopeless_if_no_model_is_in_time(scene: Scene) -> None:
    scene.report(large=9.0, medium=9.0, small=9.0)
    late = overload.SchedulingParams("standard", scene.now + 3.0, allow_degraded=True, rules=RULES)
    with pytest.raises(ExpectedLate):
        scene.overload.refuse_hopeless(["large"], late, scene.now)
    scene.report(large=9.0, medium=9.0, small=0.0)
    scene.overload.refuse_hopeless(["large"], late, scene.now)
    scene.overload.refuse_hopeless(
        ["large", "small"], overload.SchedulingParams("standard", 13.0), scene.now
    )
    with pytest.raises(ExpectedLate):
        scene.overload.refuse_hopeless(
            ["large", "medium"], overload.SchedulingParams("standard", 13.0), scene.now
        )


def test_failed_model_is_skipped_for_the_next(scene: Scene) -> None:
    scene.report(large=0.0, medium=0.0)
    scene.breakers.failed("large", RULES.breaker, scene.now)
    plan = scene.choose(3.0, allow=True)
    assert (plan.model, plan.degraded) == ("medium", True)
    with pytest.raises(ModelUnavailable, match="failed repeatedly") as caught:
        scene.choose(3.0)
    assert caught.value.retry_after_s == pytest.approx(BreakerRules().open_s)


def test_a_request_that_is_sent_after_the_pause_is_the_probe(scene: Scene) -> None:
    scene.report(large=0.0)
    scene.breakers.failed("large", RULES.breaker, scene.now - BreakerRules().open_s)
    assert scene.choose(3.0).model == "large"
    scene.overload.sent("large", "large", "standard", 1, scene.now)
    with pytest.raises(ModelUnavailable):
        scene.choose(3.0)


def asked(scene: Scene, timeout_s: float, **values: Any) -> overload.SchedulingParams:
    return overload.SchedulingParams("standard", scene.now + timeout_s, rules=RULES, **values)


def answer(scene: Scene, *tokens: int, tenant: str = "", is_cut: bool = False) -> None:
    """Answers of the model that have ended."""
    for one in tokens:
        scene.overload.lengths.observe(overload.AnswerKind("large", tenant, ""), one, is_cut=is_cut)


def test_tasks_take_free_slots_before_others_wait_for_them(scene: Scene) -> None:
    state = ClassReport(priority_class="standard", free_rows=8, queued=1, queued_tokens=20)
    model = ModelReport(model="large", workers=1, tokens_per_s=TOKENS_PER_S, classes=[state])
    scene.loads.update(BatcherReport(batcher="b1", models=[model]), scene.now)
    now, request = scene.now + 0.1, asked(scene, 0.5)
    scene.send(7)
    assert scene.overload.outlook("large", request, now).wait_s == 0.0
    scene.send(13)
    # 12 of the 20 tasks have found no slot.
    assert scene.overload.outlook("large", request, now).wait_s == pytest.approx(
        12 * 20 / 100 - 0.1
    )


def test_tasks_of_another_tenant_stand_before_nobody_else(scene: Scene) -> None:
    scene.report(large=1.0)
    scene.send(100, tenant="flood")
    scene.send(1, tenant="b")
    now = scene.now + 0.1
    waits_s = {
        tenant: scene.overload.outlook("large", asked(scene, 9.0, tenant=tenant), now).wait_s
        for tenant in ("new", "b", "flood")
    }
    assert waits_s == pytest.approx({"new": 0.9, "b": 0.9 + 0.4, "flood": 0.9 + 20.2})


@pytest.mark.parametrize(
    ("values", "total_s", "is_total"),
    [
        ({"max_tokens": 900}, 2.0, False),
        ({"max_tokens": 1}, 2.0, True),
        ({"max_tokens": 11, "min_tokens": 11}, 3.0, True),
        ({"max_tokens": 900, "tenant": "known"}, 2.0 + 4.9, True),
        ({"tenant": "known"}, 2.0 + 4.9, True),
        ({"max_tokens": 3, "tenant": "known"}, 2.2, True),
        ({"max_tokens": 900, "tenant": "known", "workload": "other"}, 2.0, False),
    ],
)
def test_the_length_of_an_answer_is_its_own(
    scene: Scene, values: dict[str, Any], total_s: float, is_total: bool
) -> None:
    answer(scene, *[50] * overload.ANSWERS_MIN, tenant="known")
    scene.report(large=1.0)
    expected = scene.overload.outlook("large", asked(scene, 9.0, **values), scene.now)
    assert (expected.total_s, expected.is_total) == (pytest.approx(total_s), is_total)


def test_prompts_take_time(scene: Scene) -> None:
    state = ClassReport(
        priority_class="standard", expected_wait_ms=1000, first_token_ms=100, prompt_token_ms=10
    )
    model = ModelReport(model="large", workers=1, classes=[state])
    scene.loads.update(BatcherReport(batcher="b1", models=[model]), scene.now)
    request = asked(scene, 9.0, prompt_tokens=200)
    assert scene.overload.outlook("large", request, scene.now).total_s == pytest.approx(3.1)


def test_a_batcher_that_measured_nothing_leaves_speeds_to_others(scene: Scene) -> None:
    scene.report("b1", large=2.0)
    silent = ModelReport(model="large", workers=1, classes=[ClassReport(priority_class="standard")])
    scene.loads.update(BatcherReport(batcher="b2", models=[silent]), scene.now)
    expected = scene.overload.outlook("large", asked(scene, 9.0, max_tokens=1), scene.now)
    assert (expected.wait_s, expected.total_s) == (1.0, 1.0 + SERVICE_S)


def test_after_the_time_to_come_back_the_queue_is_gone(scene: Scene) -> None:
    answer(scene, *[900] * overload.ANSWERS_MIN)
    scene.report(large=4.0)
    problem = scene.overload.outlook("large", asked(scene, 5.0), scene.now).problem
    assert isinstance(problem, ExpectedLate)
    # The answer alone takes 90 s: the wait is all that a later try saves.
    assert problem.retry_after_s == pytest.approx(4.0)


def test_a_time_to_come_back_is_bounded(scene: Scene) -> None:
    for wait_s, timeout_s, retry_s in (
        (9000.0, 1.0, overload.RETRY_MAX_S),
        (0.01, overload.SURE_SHARE, overload.RETRY_MIN_S),
    ):
        scene.report(large=wait_s)
        problem = scene.overload.outlook("large", asked(scene, timeout_s), scene.now).problem
        assert isinstance(problem, ExpectedLate)
        assert problem.retry_after_s == retry_s


KIND = overload.AnswerKind("m", "a", "w")
STANDARD = RANKS["standard"]


def learned(
    *tokens: int, is_cut: bool = False, kind: overload.AnswerKind = KIND
) -> overload.AnswerLengths:
    lengths = overload.AnswerLengths()
    for one in tokens:
        lengths.observe(kind, one, is_cut=is_cut)
    return lengths


def test_an_unknown_answer_has_one_token_at_least() -> None:
    lengths = learned(*[900] * (overload.ANSWERS_MIN - 1))
    assert lengths.expect(KIND, 0, 900) == (1, False)
    assert lengths.expect(KIND, 50, 900) == (50, False)
    assert lengths.expect(KIND, 0, 0) == (1, False)


@pytest.mark.parametrize(("least", "most", "tokens"), [(0, 1, 1), (40, 40, 40)])
def test_limits_alone_may_say_how_long_an_answer_is(least: int, most: int, tokens: int) -> None:
    assert overload.AnswerLengths().expect(KIND, least, most) == (tokens, True)


def test_an_answer_is_as_long_as_most_or_its_limit() -> None:
    lengths = learned(*[10] * 4, *[30] * 5, *[900] * 4)
    assert lengths.expect(KIND, 0, 0) == (30, True)
    assert lengths.expect(KIND, 0, 2) == (2, True)
    assert lengths.expect(KIND, 60, 900) == (60, True)


@pytest.mark.parametrize("other", [("m", "b", "w"), ("m", "a", "x"), ("n", "a", "w")])
def test_answers_of_others_say_nothing(other: tuple[str, str, str]) -> None:
    lengths = learned(*[900] * 50, kind=overload.AnswerKind(*other))
    assert lengths.expect(KIND, 0, 900) == (1, False)


def test_cut_answers_say_how_long_answers_are_at_least() -> None:
    lengths = learned(*[5] * overload.ANSWERS_MIN, is_cut=True)
    assert lengths.expect(KIND, 0, 900) == (5, False)
    assert lengths.expect(KIND, 0, 4) == (4, True)
    for _ in range(2 * overload.ANSWERS_MIN):
        lengths.observe(KIND, 300, is_cut=False)
    assert lengths.expect(KIND, 0, 900) == (300, True)
    for _ in range(200):
        lengths.observe(KIND, 5, is_cut=True)
    assert lengths.expect(KIND, 0, 900) == (300, True), "short limits make no answer short"


def test_kinds_of_answers_are_bounded() -> None:
    lengths = overload.AnswerLengths()
    for number in range(overload.KINDS_MAX + 1):
        lengths.observe(overload.AnswerKind("m", "a", str(number)), 1, is_cut=False)
    assert len(lengths) == overload.KINDS_MAX


def test_tokens_of_other_tenants_count_by_their_weights() -> None:
    sent = overload.SentTokens()
    for tenant, tokens in (("a", 10), ("b", 1000), ("c", 1000)):
        sent.add(STANDARD, tenant, tokens, 1.0, 0.0)
    sent.add(RANKS["interactive"], "b", 5, 1.0, 0.0)
    sent.add(RANKS["bulk"], "b", 5000, 1.0, 0.0)
    assert sent.tokens_before(STANDARD, "new", {}) == 5
    assert sent.tokens_before(STANDARD, "a", {}) == 5 + 3 * 10
    assert sent.tokens_before(STANDARD, "a", {"a": 2.0}) == 5 + 2 * 10
    assert sent.tokens_before(STANDARD, "b", {}) == 5 + 2010


@given(seed=st.integers(0, 2**32))
def test_sent_tokens_are_those_since_the_report(seed: int) -> None:
    chance, sent = random.Random(seed), overload.SentTokens()
    tasks = [
        (at, chance.randrange(3), chance.choice("ab"), chance.randrange(1, 99)) for at in range(40)
    ]
    reports = sorted(chance.sample(range(40), 3))
    for since, until in pairwise([-1, *reports, 40]):
        for at, rank, tenant, tokens in tasks:
            if since < at <= until:
                sent.add(rank, tenant, tokens, at, since)
        for rank in range(3):
            held = [one for one in tasks if since < one[0] <= until and one[1] <= rank]
            assert sum(sent.tasks[: rank + 1]) == len(held)
            most = sum(one[3] for one in held)
            assert 0 <= sent.tokens_before(rank, "a", {}) <= most
        sent.forget(until)
        assert not any(sent.tasks)
