"""Settings: the schema of a mesh's configuration file, with defaults for a mesh on this machine."""

from sluice.errors import SettingsError
from sluice.settings.identity import IdentitySettings, JwtSettings
from sluice.settings.load import load, parse, refuse
from sluice.settings.mesh import (
    BatcherSettings,
    CacheSettings,
    CallShares,
    GatewaySettings,
    HttpSettings,
    JobsSettings,
    NatsSettings,
    RecordsSettings,
    Settings,
    TelemetrySettings,
    TenantSettings,
    TlsSettings,
    TritonSettings,
)
from sluice.settings.models import ModelSettings, resolve_model_path
from sluice.settings.problems import Problem, problems

__all__ = [
    "BatcherSettings",
    "CacheSettings",
    "CallShares",
    "GatewaySettings",
    "HttpSettings",
    "IdentitySettings",
    "JobsSettings",
    "JwtSettings",
    "ModelSettings",
    "NatsSettings",
    "Problem",
    "RecordsSettings",
    "Settings",
    "SettingsError",
    "TelemetrySettings",
    "TenantSettings",
    "TlsSettings",
    "TritonSettings",
    "load",
    "parse",
    "problems",
    "refuse",
    "resolve_model_path",
]
