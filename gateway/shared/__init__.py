"""What several gateways share: idempotency keys, spending, and what each of them has counted."""
