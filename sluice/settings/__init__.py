"""Settings: the schema of a mesh's configuration file, with defaults for a mesh on this machine."""

from sluice.errors import SettingsError as SettingsError
from sluice.settings.identity import IdentitySettings as IdentitySettings
from sluice.settings.identity import JwtSettings as JwtSettings
from sluice.settings.load import load as load
from sluice.settings.load import parse as parse
from sluice.settings.load import refuse as refuse
from sluice.settings.mesh import BatcherSettings as BatcherSettings
from sluice.settings.mesh import CacheSettings as CacheSettings
from sluice.settings.mesh import CallShares as CallShares
from sluice.settings.mesh import GatewaySettings as GatewaySettings
from sluice.settings.mesh import HttpSettings as HttpSettings
from sluice.settings.mesh import JobsSettings as JobsSettings
from sluice.settings.mesh import NatsSettings as NatsSettings
from sluice.settings.mesh import RecordsSettings as RecordsSettings
from sluice.settings.mesh import Settings as Settings
from sluice.settings.mesh import TelemetrySettings as TelemetrySettings
from sluice.settings.mesh import TenantSettings as TenantSettings
from sluice.settings.mesh import TlsSettings as TlsSettings
from sluice.settings.mesh import TritonSettings as TritonSettings
from sluice.settings.models import ModelSettings as ModelSettings
from sluice.settings.models import resolve_model_path as resolve_model_path
from sluice.settings.problems import Problem as Problem
from sluice.settings.problems import problems as problems
