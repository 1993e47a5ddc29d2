"""Personal data: numbers with check digits or a strict structure, and shapes that count only in context."""

from collections.abc import Sequence
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.rules.spec import Form, RuleSpec

REGIONS: Final = ("US", "GB", "DE", "FR", "ES", "IN")
"""Where national telephone numbers are looked for unless the policy says otherwise."""

_HIGH = r"\x{80}-\x{10ffff}"
# Without the scripts that put no spaces between words: there an address begins where they end.
_SPACED = r"\x{80}-\x{dff}\x{f00}-\x{fff}\x{10a0}-\x{177f}\x{1800}-\x{2e7f}\x{a000}-\x{f8ff}\x{fb00}-\x{feff}\x{10000}-\x{1ffff}"
_PHONE_WORDS = (
    "phone", "telephone", "tel", "mobile", "cell", "call", "fax", "whatsapp", "sms", "dial", "ring", "reach", "text me",
    "telefon", "handy", "mobil", "ruf", "anruf", "rückruf", "durchwahl",
    "téléphone", "tél", "portable", "appel", "joindre",
    "teléfono", "móvil", "llama", "celular",
)  # fmt: skip
_PASSPORT_WORDS = ("passport", "reisepass", "passnummer", "passeport", "pasaporte")
_LICENCE_WORDS = (
    "driving licence", "driving license", "driver's license", "drivers license", "driver license", "driver's licence",
    "licence number", "dl no", "dl number", "dvla", "führerschein", "permis de conduire", "licencia de conducir",
    "permiso de conducir",
)  # fmt: skip
_SSN_WORDS = ("ssn", "social security", "social-security", "soc sec")
_NHS_WORDS = ("nhs", "patient", "gp surgery", "health number", "health service")
_TAX_WORDS = (
    "steuer",
    "idnr",
    "id-nr",
    "tin",
    "tax id",
    "tax number",
    "taxpayer",
    "identifikationsnummer",
)
_ID_CARD_WORDS = ("personalausweis", "ausweis", "id card", "identity card", "perso")
_AADHAAR_WORDS = ("aadhaar", "aadhar", "adhaar", "uidai", "uid")


def pii_rules(regions: Sequence[str] = REGIONS) -> tuple[RuleSpec, ...]:
    """The rules for personal data; ``regions`` as ISO 3166 codes for telephone numbers without a country code."""
    return (
        *_CONTACT,
        _national_phones(tuple(regions)),
        *_NUMBERS,
        *_DOCUMENTS,
        *_MACHINES,
        *_CRYPTO,
    )


def _national_phones(regions: tuple[str, ...]) -> RuleSpec:
    return RuleSpec(
        "pii.phone_national",
        (
            Form(r"\(?\b[2-9]\d{2}\)?[ .-]{1,2}[2-9]\d{2}[.-]\d{4}\b", hint=r"\d{3}[.-]\d{4}"),
            Form(r"\(?\b\d(?:[ ()./-]{0,2}\d){6,12}\b", in_context=True),
        ),
        Severity.MEDIUM,
        max_length=40,
        validator="phone_national",
        options=regions,
        context=_PHONE_WORDS,
    )


_CONTACT: Final = (
    RuleSpec(
        "pii.email",
        (
            Form(
                rf"[\w%+'{_SPACED}-][\w.%+'{_SPACED}-]{{0,63}}@[\w{_HIGH}][\w.{_HIGH}-]{{0,189}}\.[A-Za-z{_HIGH}]{{2,24}}",
                hint=rf"[\w%+'.{_SPACED}-]@[\w{_HIGH}]",
            ),
        ),
        Severity.MEDIUM,
        max_length=280,
        validator="email",
    ),
    RuleSpec(
        "pii.phone",
        (
            Form(r"\+[1-9](?:[ ()./-]{0,2}\d){6,14}\b"),
            Form(r"\b00[1-9](?:[ ()./-]{0,2}\d){7,13}\b", in_context=True),
        ),
        Severity.MEDIUM,
        max_length=48,
        validator="phone_international",
        context=_PHONE_WORDS,
    ),
)

_NUMBERS: Final = (
    RuleSpec(
        "pii.iban",
        (
            Form(
                r"(?i)\b[A-Z]{2}\d{2}[ -]?[A-Z0-9]{4}(?:[ -]?[A-Z0-9]{4}){1,6}(?:[ -]?[A-Z0-9]{1,4})?\b",
                hint=r"(?i)\b[A-Z]{2}\d{2}[ -]?[A-Z0-9]{4}[ -]?[A-Z0-9]{4}",
            ),
        ),
        Severity.HIGH,
        max_length=48,
        validator="iban",
    ),
    RuleSpec(
        "pii.payment_card",
        (
            Form(r"\b\d{12,19}\b"),
            Form(r"\b\d{4}[ -]\d{4}[ -]\d{4}[ -]\d{4}(?:[ -]\d{1,3})?\b"),
            Form(r"\b\d{4}[ -]\d{6}[ -]\d{4,5}\b"),
        ),
        Severity.HIGH,
        max_length=23,
        validator="payment_card",
    ),
    RuleSpec(
        "pii.us_ssn",
        (
            Form(r"\b\d{3}-\d{2}-\d{4}\b"),
            Form(r"\b\d{3}[ .]?\d{2}[ .]?\d{4}\b", in_context=True),
        ),
        Severity.HIGH,
        max_length=11,
        validator="us_ssn",
        context=_SSN_WORDS,
    ),
    RuleSpec(
        "pii.uk_nino",
        (
            Form(
                r"(?i)\b[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z][ -]?\d{2}[ -]?\d{2}[ -]?\d{2}[ -]?[A-D]\b"
            ),
        ),
        Severity.HIGH,
        max_length=13,
        validator="uk_nino",
    ),
    RuleSpec(
        "pii.uk_nhs",
        (Form(r"\b\d{3}[ -]?\d{3}[ -]?\d{4}\b", in_context=True),),
        Severity.HIGH,
        max_length=12,
        validator="uk_nhs",
        context=_NHS_WORDS,
    ),
    RuleSpec(
        "pii.de_tax_id",
        (
            Form(r"\b[1-9]\d \d{3} \d{3} \d{3}\b"),
            Form(r"\b[1-9]\d[ /]?\d{3}[ /]?\d{3}[ /]?\d{3}\b", in_context=True),
        ),
        Severity.HIGH,
        max_length=14,
        validator="de_tax_id",
        context=_TAX_WORDS,
    ),
    RuleSpec(
        "pii.fr_nir",
        (Form(r"(?i)\b[1278] ?\d{2} ?\d{2} ?\d[0-9AB] ?\d{3} ?\d{3} ?\d{2}\b"),),
        Severity.HIGH,
        max_length=21,
        validator="fr_nir",
    ),
    RuleSpec(
        "pii.in_aadhaar",
        (
            Form(r"\b[2-9]\d{3} \d{4} \d{4}\b"),
            Form(r"\b[2-9]\d{3}-\d{4}-\d{4}\b"),
            Form(r"\b[2-9]\d{11}\b", in_context=True),
        ),
        Severity.HIGH,
        max_length=14,
        validator="in_aadhaar",
        context=_AADHAAR_WORDS,
    ),
    RuleSpec(
        "pii.in_pan",
        (Form(r"(?i)\b[A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]\b", hint=r"[A-Za-z]\d{4}[A-Za-z]"),),
        Severity.HIGH,
        max_length=10,
        validator="in_pan",
    ),
)

_DOCUMENTS: Final = (
    RuleSpec(
        "pii.de_id_card",
        (Form(r"(?i)\b[LMNPRTVWXY][CFGHJKLMNPRTVWXYZ0-9]{8}\d\b", in_context=True),),
        Severity.HIGH,
        max_length=10,
        validator="de_id_card",
        context=_ID_CARD_WORDS,
    ),
    RuleSpec(
        "pii.passport",
        (
            Form(
                r"\b(?:[A-Z]{1,3}\d{6,8}|\d{9}|\d{2}[A-Z]{2}\d{5}|[CFGHJK][CFGHJKLMNPRTVWXYZ0-9]{7,8}\d?)\b",
                in_context=True,
            ),
        ),
        Severity.HIGH,
        max_length=11,
        validator="alone",
        context=_PASSPORT_WORDS,
    ),
    RuleSpec(
        "pii.driving_licence",
        (
            Form(r"\b[A-Z9]{5}\d{6}[A-Z9]{2}[A-Z0-9]{3}\b", in_context=True),
            Form(
                r"\b(?:[A-Z]\d{7,14}|[A-Z]{2}\d{2} ?\d{11}|\d{7,9}|[A-Z0-9]{9}[0-9X][A-Z0-9]|\d{2}[A-Z]{2}\d{5})\b",
                in_context=True,
            ),
        ),
        Severity.HIGH,
        max_length=16,
        validator="alone",
        context=_LICENCE_WORDS,
    ),
)

_MACHINES: Final = (
    RuleSpec(
        "pii.ipv4",
        (Form(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"),),
        Severity.LOW,
        max_length=15,
        validator="ipv4",
    ),
    RuleSpec(
        "pii.ipv6",
        (
            Form(
                r"(?i)\b[0-9a-f]{1,4}(?::[0-9a-f]{0,4}){2,7}\b",
                hint=r":[0-9a-fA-F]{0,4}:",
            ),
        ),
        Severity.LOW,
        max_length=39,
        validator="ipv6",
    ),
    RuleSpec(
        "pii.mac",
        (
            Form(
                r"(?i)\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b",
                hint=r"[0-9a-fA-F]{2}[:-][0-9a-fA-F]{2}[:-][0-9a-fA-F]{2}[:-]",
            ),
        ),
        Severity.LOW,
        max_length=17,
        validator="mac",
    ),
)

_CRYPTO: Final = (
    RuleSpec(
        "pii.bitcoin_address",
        (
            Form(r"\b[13][1-9A-HJ-NP-Za-km-z]{25,34}\b"),
            Form(
                r"\b(?:bc1[02-9ac-hj-np-z]{8,87}|BC1[02-9AC-HJ-NP-Z]{8,87})\b",
                hint=r"\b(?:bc1|BC1)[02-9a-zA-Z]{8}",
            ),
        ),
        Severity.MEDIUM,
        max_length=90,
        validator="bitcoin_address",
    ),
    RuleSpec(
        "pii.ethereum_address",
        (Form(r"\b0x[0-9a-fA-F]{40}\b"),),
        Severity.MEDIUM,
        max_length=42,
        validator="ethereum_address",
    ),
)
