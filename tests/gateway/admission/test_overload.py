"""Who is refused, who is sent elsewhere, and what the wait is taken to be between two reports."""

import pytest

from gateway.admission.overload import (
    MARGIN,
    ModelLoadTable,
    OverloadControl,
    OverloadRules,
    SchedulingParams,
)
from gateway.routing.breaker import Breakers
from gateway.routing.plan import Plan
from sluice.errors import ModelUnavailable, Overloaded
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerSettings
from sluice.v1.admin_pb2 import RouteCandidate, RouteRecord
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY, RouteStrategy

RULES = OverloadRules(
    BreakerSettings(failures=1),
    fallbacks={"large": ("medium", "small")},
    models={
        name: ModelSettings(name=name, path=name, tier=name[0])
        for name in ("large", "medium", "small")
    },
)
TOKENS_PER_S = 100.0
SERVICE_S = 1.0


class Scene:
    """Two models with one batcher; ``now`` is the time of the last report."""

    def __init__(self) -> None:
        self.now = 10.0
        self.loads = ModelLoadTable()
        self.breakers = Breakers()
        self.overload = OverloadControl(self.loads, self.breakers)

    def report(self, batcher: str = "b1", **waits_s: float) -> None:
        """Expected waits of standard tasks by model; twenty tokens each."""
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
                        service_ms=SERVICE_S * 1e3,
                    )
                ],
            )
            for model, wait_s in waits_s.items()
        ]
        self.loads.update(BatcherReport(batcher=batcher, models=models), self.now)

    def choose(
        self,
        timeout_s: float,
        *,
        allow: bool = False,
        after_s: float = 0.0,
        strategy: RouteStrategy.ValueType = ROUTE_STRATEGY_PINNED,
    ) -> Plan:
        now = self.now + after_s
        scheduling = SchedulingParams("standard", now + timeout_s, allow, rules=RULES)
        asked = RouteCandidate(model="large", tier="l", reason="asked for")
        plan = Plan(RouteRecord(strategy=strategy, reason="asked for", candidates=[asked]))
        self.overload.check(plan, scheduling, now)
        return plan


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_is_in_time_goes_where_it_was_sent(scene: Scene) -> None:
    scene.report(large=2.0)
    assert scene.choose(3.8).model == "large"


def test_a_tenant_that_floods_a_model_leaves_the_others_their_wait(scene: Scene) -> None:
    def class_of(wait_s: float, **tenants_s: float) -> ClassReport:
        return ClassReport(
            priority_class="standard",
            queued=10,
            expected_wait_ms=1e3 * wait_s,
            service_ms=SERVICE_S * 1e3,
            tenant_wait_ms={name: 1e3 * one for name, one in tenants_s.items()},
        )

    for batcher, entry in (("b1", class_of(0.5, loud=60.0)), ("b2", class_of(0.5, loud=20.0))):
        model = ModelReport(model="large", workers=1, tokens_per_s=TOKENS_PER_S, classes=[entry])
        scene.loads.update(BatcherReport(batcher=batcher, models=[model]), scene.now)
    for tenant, wait_s, is_late in (("loud", 40.0, True), ("quiet", 0.5, False)):
        scheduling = SchedulingParams("standard", scene.now + 10.0, tenant=tenant)
        assert scene.overload.wait_s("large", scheduling, scene.now) == pytest.approx(wait_s)
        problem = scene.overload.problem("large", scheduling, scene.now)
        assert isinstance(problem, Overloaded) is is_late


def test_what_would_be_late_is_refused_with_the_time_to_come_back(scene: Scene) -> None:
    scene.report(large=4.0)
    with pytest.raises(Overloaded, match=r"large would take 5\.0 s") as caught:
        scene.choose(3.0)
    assert caught.value.retry_after_s == pytest.approx(5.0 - 3.0 * (1 - MARGIN))
    with pytest.raises(Overloaded):  # it could be in time only if all went by the estimate
        scene.choose(5.1)


def test_while_nothing_waits_nothing_is_refused(scene: Scene) -> None:
    scene.report(large=0.0)
    assert scene.choose(0.01).model == "large"


def test_without_a_worker_the_model_is_unavailable(scene: Scene) -> None:
    with pytest.raises(ModelUnavailable):
        scene.choose(3.0)


def test_the_first_smaller_model_in_time_answers_if_the_caller_allows_it(scene: Scene) -> None:
    scene.report(large=9.0, medium=9.0, small=0.1)
    plan = scene.choose(3.0, allow=True)
    assert (plan.model, plan.tier, plan.route.degraded) == ("small", "s", True)
    assert plan.route.reason == "asked for; degraded: large would take 10.0 s, past the deadline"
    with pytest.raises(Overloaded, match="large"):
        scene.choose(3.0)


def test_a_smaller_model_answers_for_one_that_nobody_serves(scene: Scene) -> None:
    scene.report(small=0.1)
    assert scene.choose(3.0, allow=True).model == "small"


def test_where_safety_sends_a_request_it_stays(scene: Scene) -> None:
    scene.report(large=9.0, small=0.0)
    with pytest.raises(Overloaded):
        scene.choose(3.0, allow=True, strategy=ROUTE_STRATEGY_SAFETY)


def test_the_wait_grows_by_what_was_sent_since_the_report_and_shrinks_with_time(
    scene: Scene,
) -> None:
    scene.report(large=1.0)
    assert scene.choose(2.6).model == "large"
    # Ten tasks of twenty tokens are two seconds of work.
    for _ in range(10):
        scene.overload.sent("large", "large", "standard", 999, scene.now + 0.1)
    with pytest.raises(Overloaded) as caught:
        scene.choose(2.5, after_s=0.5)
    wait_s = 1.0 + 2.0 - 0.5
    assert caught.value.retry_after_s == pytest.approx(wait_s + SERVICE_S - 2.5 * (1 - MARGIN))
    assert scene.choose(2.6, after_s=2.0).model == "large"


def test_a_report_knows_of_what_was_sent_before_it(scene: Scene) -> None:
    scene.report(large=1.0)
    for _ in range(100):
        scene.overload.sent("large", "large", "standard", 20, scene.now + 0.1)
    scene.now += 1.0
    scene.report(large=1.0)
    assert scene.choose(2.6).model == "large"


def test_what_was_sent_is_forgotten_where_nobody_asks_for_the_wait(scene: Scene) -> None:
    for _ in range(100):
        scene.report(large=1.0)
        scene.overload.sent("large", "large", "standard", 20, scene.now + 0.1)
        scene.now += 1.0
    assert len(scene.overload._sent["large"]._tasks) <= 2


def test_less_urgent_tasks_do_not_count(scene: Scene) -> None:
    scene.report(large=1.0)
    for _ in range(100):
        scene.overload.sent("large", "large", "bulk", 20, scene.now + 0.1)
    assert scene.choose(2.6, after_s=0.2).model == "large"


def test_batchers_share_the_work(scene: Scene) -> None:
    scene.report("b1", large=4.0)
    scene.report("b2", large=0.0)
    load = scene.loads.load("large", scene.now)
    assert load.tokens_per_s == 2 * TOKENS_PER_S
    assert load.of_class("standard").wait_s == 2.0


def test_a_request_is_hopeless_when_no_model_that_may_answer_is_in_time(scene: Scene) -> None:
    scene.report(large=9.0, medium=9.0, small=9.0)
    late = SchedulingParams("standard", scene.now + 3.0, allow_degraded=True, rules=RULES)
    with pytest.raises(Overloaded):
        scene.overload.refuse_hopeless(["large"], late, scene.now)
    scene.report(large=9.0, medium=9.0, small=0.0)
    scene.overload.refuse_hopeless(["large"], late, scene.now)
    scene.overload.refuse_hopeless(
        ["large", "small"], SchedulingParams("standard", 13.0), scene.now
    )
    with pytest.raises(Overloaded):
        scene.overload.refuse_hopeless(
            ["large", "medium"], SchedulingParams("standard", 13.0), scene.now
        )


def test_a_model_that_failed_is_left_alone_and_the_next_one_answers(scene: Scene) -> None:
    scene.report(large=0.0, medium=0.0)
    scene.breakers.failed("large", RULES.breaker, scene.now)
    plan = scene.choose(3.0, allow=True)
    assert (plan.model, plan.route.degraded) == ("medium", True)
    with pytest.raises(ModelUnavailable, match="failed repeatedly") as caught:
        scene.choose(3.0)
    assert caught.value.retry_after_s == pytest.approx(BreakerSettings().open_s)


def test_a_request_that_is_sent_after_the_pause_is_the_probe(scene: Scene) -> None:
    scene.report(large=0.0)
    scene.breakers.failed("large", RULES.breaker, scene.now - BreakerSettings().open_s)
    assert scene.choose(3.0).model == "large"
    scene.overload.sent("large", "large", "standard", 1, scene.now)
    with pytest.raises(ModelUnavailable):
        scene.choose(3.0)
