"""One text per rule that it finds and one that looks alike and is none. Tokens are made up and put together here."""

_LETTERS = "aB3dE5gH7jK9mN2pQ4sT6vW8yZ1bC0eF"
_HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def letters(count: int) -> str:
    return (_LETTERS * (count // 32 + 1))[:count]


def hexadecimal(count: int) -> str:
    return (_HEX * (count // 32 + 1))[:count]


_PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\n" + (letters(64) + "\n") * 6 + "-----END RSA PRIVATE KEY-----"
)
_JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0In0." + letters(43)

FOUND = {
    "pii.email": "jörg.müller+news@exämple.co.uk",
    "pii.phone": "+49 (30) 901820",
    "pii.phone_national": "(212) 555-1234",
    "pii.iban": "DE89 3704 0044 0532 0130 00",
    "pii.payment_card": "4111 1111 1111 1111",
    "pii.us_ssn": "123-45-6789",
    "pii.uk_nino": "AB 12 34 56 C",
    "pii.in_pan": "ABCPE1234F",
    "pii.ipv4": "81.2.69.142",
    "pii.ipv6": "2a02:8070:1::8a2e:370:7334",
    "pii.mac": "3c:22:fb:8a:01:9d",
    "pii.bitcoin_address": "1NEDqZPvTWRaoho48qXuLLsrYomMXPABfD",
    "pii.ethereum_address": "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "secret.aws_access_key": "AKIA" + "Q3ZK7WPX2MNB5TRD",
    "secret.gcp_api_key": "AIza" + letters(35),
    "secret.gcp_oauth": "ya29." + letters(60),
    "secret.google_client_secret": "GOCSPX-" + letters(28),
    "secret.azure_storage_key": "AccountKey=" + letters(86) + "==",
    "secret.azure_sas": "sig=" + letters(43) + "%3D",
    "secret.github_token": "ghp_" + letters(36),
    "secret.github_pat": "github_pat_" + letters(22) + "_" + letters(59),
    "secret.gitlab_token": "glpat-" + letters(20),
    "secret.slack_token": "xoxb-1234567890-" + letters(24),
    "secret.slack_webhook": "hooks.slack.com/services/T0"
    + letters(8)
    + "/B0"
    + letters(8)
    + "/"
    + letters(24),
    "secret.stripe_key": "sk_live_" + letters(24),
    "secret.stripe_webhook": "whsec_" + letters(32),
    "secret.anthropic_key": "sk-ant-api03-" + letters(93),
    "secret.openai_key": "sk-proj-" + letters(48),
    "secret.npm_token": "npm_" + letters(36),
    "secret.pypi_token": "pypi-AgEIcHlwaS5vcmc" + letters(120),
    "secret.twilio_key": "SK" + hexadecimal(32),
    "secret.sendgrid_key": "SG." + letters(22) + "." + letters(43),
    "secret.mailgun_key": "key-" + hexadecimal(32),
    "secret.huggingface_token": "hf_" + letters(34),
    "secret.digitalocean_token": "dop_v1_" + hexadecimal(64),
    "secret.databricks_token": "dapi" + hexadecimal(32),
    "secret.shopify_token": "shpat_" + hexadecimal(32),
    "secret.vault_token": "hvs." + letters(24),
    "secret.jwt": _JWT,
    "secret.private_key": _PEM,
}
"""Rule and a text that is the finding from end to end."""

IN_CONTEXT = {
    "pii.us_ssn": ("My social security number: {}", "123 45 6789"),
    "pii.uk_nhs": ("NHS number {}", "943 476 5919"),
    "pii.de_tax_id": ("Steuer-ID {}", "36574261809"),
    "pii.in_aadhaar": ("aadhaar {}", "234123412346"),
    "pii.phone_national": ("Telefon {}", "22334455"),
    "pii.phone": ("Telefon {}", "004930901820"),
    "pii.de_id_card": ("Personalausweis {}", "T220001293"),
    "pii.passport": ("passport no. {}", "C01X00T47"),
    "pii.driving_licence": ("UK driving licence {}", "MORGA657054SM9IJ"),
    "secret.assignment": ("db_password = '{}'", "hunter2Xq9"),
    "secret.azure_client_secret": ("client secret abc{}", "8Q~" + letters(34)),
    "secret.telegram_bot": ("bot 123456789:{}", "AA" + letters(33)),
    "secret.connection_string": ("url=postgres://{}", "app:s3cr3tPw9@db.internal:5432"),
}
"""Rule, what must stand before the thing, and the thing, which is nothing without it."""

NOT_FOUND = (
    "logo@2x.png", "git@github.com:acme/x.git", "a@b", "user@@example.com", "4111 1111 1111 1112", "411111111111111",
    "0.4111111111111111", "DE89 3704 0044 0532 0130 01", "000-12-3456", "123-00-4567", "GB123456A", "ABCDE1234F",
    "version 1.2.3.4", "127.0.0.1", "255.255.255.0", "300.1.1.1", "12:34:56", "std::vector", "00:00:00:00:00:00",
    "1NEDqZPvTWRaoho48qXuLLsrYomMXPABfX", "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAeD",
    "0x0000000000000000000000000000000000000000", "AKIAIOSFODNN7EXAMPLE", "sk-this-is-only-a-long-slug-of-words",
    "eyJhbGciOiJub3QganNvbg.abc.def", "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    "postgres://user:password@localhost/db", "https://user:${TOKEN}@host/x", "password: changeme123",
    "password = os.environ['X']", "token = tokenizer.encode_plus(text)", "token: 2024-01-01T00:00",
    "+1 23", "+49 30", "2019 2020 2021", "2001 1990 1994", "36574261809", "943 476 5919", "C01X00T47", "T220001293",
)  # fmt: skip
