"""Names of services, spans, metrics and attributes. Dashboards and tests read these: renaming one is a breaking change.

The spans of one request, by parent. Every answer's trace holds all of them; `=>` is a link:

    sluice-gateway  sluice.v1.InferenceService/Generate      (server; parent: the caller's context; of a call over HTTP
                                                              the method and route, as POST /v1/chat/completions)
      sluice-gateway  safety
      sluice-gateway  route
      sluice-gateway  tokenize
      sluice-gateway  chat small                             (client; operation and model: a row of a model, until it
        sluice-triton   ...                                   has ended; its context travels in the NATS headers)
        sluice-batcher  task                                 (consumer; until the final frame)
          sluice-batcher  queue
          sluice-batcher  batch                              (until the row leaves its worker; that of the first
            sluice-worker   prefill                          row is the batch's own: it links => to the model span of
            sluice-worker   decode                           every row, the others' batch spans to that of the first)
      sluice-gateway  apply_guardrail                        (one for each check of a guard model, beside the others;
        sluice-batcher  task ...                              its rows hang under it)
      sluice-gateway  shadow                                 (one for each shadow; it begins when the server span has
        sluice-batcher  task ...                              ended; its row hangs under it)

Embed, Rerank and Score have one model span for all their rows, and only the first rows hang under it.

Triton's spans of a batch hang under the model span of its first row; of many batches a second not all have them. The
spans of a process that is killed may be missing, also above others; those of a worker whose batcher is lost hang under
the model span.
cli/trace_rules.py has the rules of a trace.

An item's server span is the child of its job's span, of `jobs`, which lasts while one process has the job:

    sluice-jobs  job
      sluice-gateway  sluice.v1.InferenceService/Generate ...

Attributes follow OpenTelemetry's GenAI and messaging conventions (both in Development), else "sluice.*". Of guards the
conventions have no stable names yet: the ones here follow the current proposals.
"""

from typing import Final

SERVICE_GATEWAY: Final = "sluice-gateway"
SERVICE_BATCHER: Final = "sluice-batcher"
SERVICE_WORKER: Final = "sluice-worker"
SERVICE_JOBS: Final = "sluice-jobs"
SERVICE_TRITON: Final = "sluice-triton"

SPAN_GENERATE: Final = "sluice.v1.InferenceService/Generate"
SPAN_EMBED: Final = "sluice.v1.InferenceService/Embed"
SPAN_GENERATE_BATCH: Final = "sluice.v1.InferenceService/GenerateBatch"
SPAN_RERANK: Final = "sluice.v1.InferenceService/Rerank"
SPAN_SCORE: Final = "sluice.v1.InferenceService/Score"
SPAN_SAFETY: Final = "safety"
SPAN_ROUTE: Final = "route"
SPAN_TOKENIZE: Final = "tokenize"
SPAN_GUARD: Final = "apply_guardrail"
SPAN_SHADOW: Final = "shadow"
SPAN_TASK: Final = "task"
SPAN_QUEUE: Final = "queue"
SPAN_BATCH: Final = "batch"
SPAN_PREFILL: Final = "prefill"
SPAN_DECODE: Final = "decode"
SPAN_JOB: Final = "job"

JOB_ID: Final = "sluice.job.id"
REQUEST_ID: Final = "sluice.request.id"
PRIORITY_CLASS: Final = "sluice.class"
TENANT: Final = "sluice.tenant"
TIER: Final = "sluice.tier"
ROUTE_STRATEGY: Final = "sluice.route.strategy"
ROUTE_REASON: Final = "sluice.route.reason"
ROUTE_DEGRADED: Final = "sluice.route.degraded"
ROUTE_ESCALATED: Final = "sluice.route.escalated"
"""Why a cascade escalated to its second model."""
HINT_TOKENS: Final = "sluice.route.hint.tokens"
"""Tokens that the first model's draft adds to the prompt of a cascade's second model."""
SHADOW_AGREEMENT: Final = "sluice.shadow.agreement"
"""How far a shadow's answer agrees with the one that the caller got, 0 to 1."""
ATTEMPT: Final = "sluice.attempt"
"""How often its gateway had sent the row to a batcher before."""
END: Final = "sluice.end"
"""How an attempt ended: "answered", "escalated", "lost", "refused", "returned", "superseded", ..."""
CACHED: Final = "sluice.cached"
RECOVERED: Final = "sluice.recovered"
"""How often another process continued the answer."""
RECOVERED_FROM: Final = "sluice.recovered.from"
"""What was lost last: "worker" or "batcher"."""
RECOVERED_GAP_S: Final = "sluice.recovered.gap"
"""The longest time without a token because of it, seconds."""
TEXTS: Final = "sluice.texts"
"""Texts of a call of Embed, documents of Rerank, answers of Score."""
MODELS_TRIED: Final = "sluice.models"
"""Models that worked on the request, in their order."""
BATCH_ID: Final = "sluice.batch.id"
BATCH_ROWS: Final = "sluice.batch.rows"
BATCH_CAUSE: Final = "sluice.batch.cause"
BATCH_LIMIT: Final = "sluice.batch.limit"
WORKER_ID: Final = "sluice.worker.id"
WORKER_ADDRESS: Final = "sluice.worker.address"
"""Where the worker is, "HOST:PORT/NAME" of its Triton: the same after a restart, unlike its id."""
FINDINGS: Final = "sluice.safety.findings"
"""Each "RULE:ACTION" that occurred, once."""
FINDING_COUNT: Final = "sluice.safety.count."
"""With the name of an action behind it: how many findings ended that way."""
SAFETY_POLICY: Final = "sluice.safety.policy"
"""Version of the policy that decided, such as "default@0123456789ab"."""
DRY_RUN: Final = "sluice.safety.dry_run"
"""Each "RULE:NOW>THEN" in which the policy in dry run differs from the active one, once."""
ERROR_REASON: Final = "error.type"

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_SYSTEM: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
"""Tokens of the prompt that the worker found in its prefix cache."""
GEN_AI_COST: Final = "gen_ai.usage.cost"
"""By the prices of the configuration; the conventions have no name for it, and this is the one that others use."""
GEN_AI_CONVERSATION: Final = "gen_ai.conversation.id"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_DETAILS: Final = "gen_ai.client.inference.operation.details"
"""The event with the messages of both."""
INPUT_TOKENS: Final = "sluice.tokens.input"
"""Tokens of a prompt on spans below that of the model: tools add up whatever is called "gen_ai.usage"."""
OUTPUT_TOKENS: Final = "sluice.tokens.output"
GEN_AI_DIMENSIONS: Final = "gen_ai.embeddings.dimension.count"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TTFT: Final = "gen_ai.server.time_to_first_token"
"""On spans and as a histogram, seconds."""

GUARDRAIL_OPERATION: Final = "apply_guardrail"
GUARDRAIL_NAME: Final = "gen_ai.guardrail.name"
"""As the policy names it."""
GUARDRAIL_TARGET: Final = "gen_ai.guardrail.target"
"""What is judged: "input" or "output"."""
GUARDRAIL_OUTCOMES: Final = "gen_ai.guardrail.outcomes"
"""Each "RULE:ACTION": "pass", a category, or why there is no verdict."""

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_TEMPLATE: Final = "messaging.destination.template"
"""Not the name: a task is on its way before it is known to which batcher."""
MESSAGING_OPERATION: Final = "messaging.operation.type"
SEND: Final = "send"
"""Value of `MESSAGING_OPERATION` on the spans of models' work."""

RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
"""The name of a gRPC code, such as "DEADLINE_EXCEEDED"."""
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
"""Of a call that failed."""
