"""What is changed, and the tests near it that should notice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EQUIVALENT: Final = Path(__file__).parent / "equivalent.toml"
"""Mutants that no test can notice, each with the reason."""
Names = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Files that are changed, and their tests.

    Attributes:
        files: each with the functions and classes that are changed; none: all.
        tests: files and folders.
    """

    files: dict[str, Names]
    tests: Names


@dataclass(frozen=True)
class Suite:
    """All of it; paths are relative to ``root``. ``options``: more of pytest."""

    groups: tuple[Group, ...]
    root: Path = ROOT
    equivalent: Path = EQUIVALENT
    options: Names = ()

    @property
    def files(self) -> dict[str, Names]:
        return {file: names for group in self.groups for file, names in group.files.items()}

    @property
    def tests(self) -> Names:
        return tuple(dict.fromkeys(test for group in self.groups for test in group.tests))

    def tests_of(self, file: str) -> Names:
        return next(group.tests for group in self.groups if file in group.files)


IDENTITY: Final = Group(
    {
        "gateway/identity/authenticator.py": (),
        "gateway/identity/caller.py": (),
        "gateway/identity/key_sources.py": (),
        "gateway/identity/credentials.py": (),
    },
    ("tests/gateway/identity",),
)
LIMITS: Final = Group(
    {
        "gateway/admission/arrivals.py": (),
        "gateway/admission/class_limiter.py": (),
        "gateway/admission/tenant_limits.py": (),
        "gateway/admission/token_bucket.py": (),
    },
    (
        "tests/gateway/admission/test_arrivals.py",
        "tests/gateway/admission/test_class_limiter.py",
        "tests/gateway/admission/test_tenant_limits.py",
        "tests/gateway/admission/test_token_bucket.py",
        "tests/gateway/admission/test_call_turns.py",
    ),
)
SAFETY: Final = Group(
    {"gateway/safety/actions.py": ()},
    ("tests/gateway/safety/test_actions.py", "tests/gateway/safety/test_placeholders.py"),
)
_TENANTS: Final = (
    "CreateJob",
    "GetJob",
    "ListJobs",
    "DeleteJob",
    "GetUpload",
    "ListUploads",
    "DeleteUpload",
    "_upload",
    "_fingerprint",
    "_own",
    "_change",
)
JOBS: Final = Group(
    {
        "jobs/quotas.py": (),
        "jobs/service.py": (
            *(f"JobService.{name}" for name in _TENANTS),
            *("tenant_of", "scope_of", "new_job_id", "_check_owner"),
        ),
        "jobs/stage_log.py": (),
        "jobs/stage_attempt.py": (),
        "jobs/store.py": (),
    },
    (
        "tests/jobs/test_stage_attempt.py",
        "tests/jobs/test_quotas.py",
        "tests/jobs/test_service.py",
        "tests/jobs/test_store.py",
        "tests/jobs/test_tenants.py",
    ),
)
ITEMS: Final = Group(
    {"jobs/core/window.py": ("DoneIndexes",), "jobs/core/leases.py": ()},
    ("tests/jobs/core/test_done.py", "tests/jobs/core/test_leases.py"),
)
_DELIVERED: Final = (
    "join",
    "matches",
    "read",
    "_was_replaced",
    "_started",
    "block",
    "_add_resume_token",
)
RESUME: Final = Group(
    {
        "gateway/streaming/answer_stream.py": tuple(f"AnswerStream.{name}" for name in _DELIVERED),
        "gateway/streaming/idempotency.py": (),
        "gateway/streaming/registry.py": (
            *(f"Registry.{name}" for name in ("find", "drop_replays")),
        ),
        "gateway/identity/resume_token.py": (),
        "gateway/validation/requests.py": ("_resumed", "_issued_by"),
    },
    (
        "tests/gateway/streaming",
        "tests/gateway/validation/test_requests.py",
    ),
)
PERMISSIONS: Final = Group(
    {"sluice/wire/permissions.py": ()}, ("tests/sluice/wire/test_permissions.py",)
)
SUITE: Final = Suite(
    (IDENTITY, LIMITS, SAFETY, ITEMS, JOBS, RESUME, PERMISSIONS), options=("-m", "not long")
)
