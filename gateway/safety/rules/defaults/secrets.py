"""Secrets: tokens by the prefixes their issuers document, keys, passwords in URLs and behind their names."""

from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.rules.spec import Form, RuleSpec

_KEYWORDS = (
    r"password|passwd|passphrase|pwd|passwort|kennwort|mot de passe|contraseña|"
    r"secret|token|api[_ -]?key|access[_ -]?key|secret[_ -]?key|private[_ -]?key|auth[_ -]?key|encryption[_ -]?key|"
    r"account[_ -]?key|credentials?|bearer"
)
_ASSIGNED = rf"(?i)(?:{_KEYWORDS})[\"'`]?\s{{0,3}}(?:=>|:=|[:=])[\s\"'`]{{0,4}}"
_SAID = r"(?i)\b(?:password|passcode|passwort|kennwort|mot de passe|contraseña) (?:is|ist|est|es)[: ]{1,2}[\"'`]?"
_SCHEME = r"(?i)\b[a-z][a-z0-9+.-]{1,20}://"


def _token(
    name: str, pattern: str, max_length: int, validator: str = "", hint: str = "", head: str = ""
) -> RuleSpec:
    """``pattern`` begins behind ``head``."""
    form = Form(head + pattern, hint=hint, head=head)
    return RuleSpec(f"secret.{name}", (form,), Severity.CRITICAL, max_length, validator)


SECRET_RULES: Final = (
    _token("aws_access_key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b", 20, "aws_key"),
    _token("gcp_api_key", r"\bAIza[0-9A-Za-z_-]{35}", 39),
    _token("gcp_oauth", r"\bya29\.[0-9A-Za-z_-]{20,250}", 255, hint=r"\bya29\.[0-9A-Za-z_-]{20}"),
    _token("google_client_secret", r"\bGOCSPX-[0-9A-Za-z_-]{28}", 35),
    _token("azure_storage_key", r"\bAccountKey=[A-Za-z0-9+/]{86}==", 99),
    _token(
        "azure_client_secret",
        r"[0-9]Q~[A-Za-z0-9_~.-]{31,34}",
        40,
        "azure_client_secret",
        r"[0-9]Q~[A-Za-z0-9_~.-]{31}",
        head=r"\b[A-Za-z0-9_~.-]{3}",
    ),
    _token("azure_sas", r"\bsig=[A-Za-z0-9%/+]{43,64}(?:%3[Dd]|=)", 71),
    _token(
        "github_token",
        r"\bgh[pousr]_[A-Za-z0-9]{36,251}\b",
        255,
        hint=r"\bgh[pousr]_[A-Za-z0-9]{36}",
    ),
    _token(
        "github_pat",
        r"\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}",
        93,
        hint=r"\bgithub_pat_[A-Za-z0-9]{22}_",
    ),
    _token(
        "gitlab_token",
        r"\bgl(?:pat|dt|rt|ptt|cbt|soat|ft|agent|imt|oas)-[0-9A-Za-z_.-]{20,120}",
        128,
        "token",
    ),
    _token(
        "slack_token",
        r"\bx(?:ox[abeoprs]|app)-[0-9A-Za-z-]{10,240}",
        245,
        "token",
        r"\bx(?:ox[abeoprs]|app)-[0-9A-Za-z-]{10}",
    ),
    _token(
        "slack_webhook", r"\bhooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9+/]{40,80}", 110
    ),
    _token(
        "stripe_key",
        r"\b(?:sk|rk)_(?:live|test)_[0-9A-Za-z]{16,247}",
        255,
        "token",
        r"\b(?:sk|rk)_(?:live|test)_[0-9A-Za-z]{16}",
    ),
    _token("stripe_webhook", r"\bwhsec_[A-Za-z0-9+/]{32,64}", 70, "token"),
    _token(
        "anthropic_key",
        r"\bsk-ant-[a-z]{2,8}\d{2}-[A-Za-z0-9_-]{60,120}",
        140,
        hint=r"\bsk-ant-[a-z]{2,8}\d{2}-",
    ),
    _token(
        "openai_key",
        r"\bsk-(?:(?:proj|svcacct|admin|None)-)?[A-Za-z0-9_-]{20,220}",
        240,
        "token",
        r"\bsk-[A-Za-z0-9_-]{20}",
    ),
    _token("npm_token", r"\bnpm_[A-Za-z0-9]{36}\b", 40),
    _token("pypi_token", r"\bpypi-AgE[A-Za-z0-9_-]{50,240}", 250, hint=r"\bpypi-AgE"),
    _token("twilio_key", r"\bSK[0-9a-f]{32}\b", 34),
    _token("sendgrid_key", r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}", 69),
    _token("mailgun_key", r"\bkey-[0-9a-f]{32}\b", 36),
    _token("huggingface_token", r"\bhf_[A-Za-z0-9]{34,40}\b", 43),
    _token("digitalocean_token", r"\bdo[opr]_v1_[0-9a-f]{64}\b", 71),
    _token("databricks_token", r"\bdapi[0-9a-f]{32}(?:-\d)?\b", 38),
    _token("shopify_token", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}\b", 38),
    _token(
        "vault_token",
        r"\bhv[sbr]\.[A-Za-z0-9_-]{24,200}",
        204,
        "token",
        r"\bhv[sbr]\.[A-Za-z0-9_-]{24}",
    ),
    _token("telegram_bot", r"AA[A-Za-z0-9_-]{33}", 46, "telegram_bot", head=r"\b\d{8,10}:"),
    RuleSpec(
        "secret.jwt",
        (
            Form(
                r"\beyJ[A-Za-z0-9_-]{8}",
                stream=r"\beyJ[A-Za-z0-9_-]{8}[A-Za-z0-9_.-]*",
            ),
        ),
        Severity.CRITICAL,
        max_length=4096,
        validator="jwt",
    ),
    RuleSpec(
        "secret.private_key",
        (
            Form(
                r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----",
                stream=r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
                r"(?:-?[A-Za-z0-9+/=\s\\:,.])*-?(?:-----END [A-Z0-9 ]{1,48}-----)?",
            ),
        ),
        Severity.CRITICAL,
        max_length=16384,
        validator="private_key",
    ),
    RuleSpec(
        "secret.connection_string",
        (
            Form(
                _SCHEME + r"[^\s:/@\"'<>]{0,64}:[^\s/@\"'<>]{1,128}@[\w.:-]{1,128}",
                hint=r"(?i)[a-z0-9+.-]://[^\s:/@\"'<>]{0,64}:",
                head=_SCHEME,
            ),
        ),
        Severity.CRITICAL,
        max_length=350,
        validator="connection_string",
    ),
    RuleSpec(
        "secret.assignment",
        (
            Form(
                _ASSIGNED + r"[^\s\"'`,;(){}<>\[\]]{8,128}",
                hint=rf"(?i)(?:{_KEYWORDS})[\"'`]?\s{{0,3}}[:=]",
                head=_ASSIGNED,
            ),
            Form(_SAID + r"[^\s\"'`,;(){}<>\[\]]{8,64}", head=_SAID),
        ),
        Severity.HIGH,
        max_length=160,
        validator="assignment",
    ),
)
