# Generated from aio.py by scripts/gen_client; do not edit.
"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Self, Unpack

from sluice.client import channel
from sluice.client.answer import Answer, AnswerBuilder, Event
from sluice.client.batch import (
    BATCH_CONCURRENCY,
    AnswerBatch,
    all_blocking,
    answer_batch,
    batch_requests,
    one_request,
)
from sluice.client.channel import LISTING_S, LOOKUP_S
from sluice.client.jobs_blocking import Caller, Jobs
from sluice.client.request import (
    GenerateOptions,
    Prompt,
    TextOptions,
    check_request,
    count_request,
    generate_request,
    set_prompt,
)
from sluice.client.resumption import ResumableAnswer, SeveralAnswers
from sluice.client.retry import Retries, RetryPolicy
from sluice.client.texts import (
    CALLS,
    TEXTS_S,
    Embeddings,
    embed_requests,
    embeddings_of,
    text_request,
)
from sluice.defaults import AUTO
from sluice.errors import SluiceError
from sluice.v1 import admin_pb2, safety_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.v1.safety_pb2_grpc import SafetyServiceStub
from sluice.wire.clock import timestamp


class AnswerStream(Iterator[Event]):
    """The events of one answer. The call starts when the first event is read.

    Use the stream as a context manager, or close it, if you may stop before its end: closing it cancels the request.
    """

    def __init__(self, events: Generator[Event]) -> None:
        self._events = events

    def __next__(self) -> Event:
        return next(self._events)

    def answer(self) -> Answer:
        """Read the stream to its end and return the answer; valid only before any event was read.

        Raises:
            SluiceError: The answer failed before it was complete.
        """
        builder = AnswerBuilder()
        with self:
            for event in self:
                builder.add(event)
        return builder.build()

    def close(self) -> None:
        """Cancel the call if it is still running."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(Caller):
    """A client of one or more gateways. Errors are the classes of `sluice.errors`.

    Use it as a context manager. The asyncio client belongs to the event loop that it is created in. Threads may share a
    blocking client, but not a stream.

    Args:
        address: HOST:PORT of the gateway, or several with commas between them; a name may resolve to several gateways.
            The default is SLUICE_ADDRESS, else 127.0.0.1:50051.
        retry: How often and how soon to retry; the default is `RetryPolicy()`.
        tenant: Tenant of the requests, if the gateway asks for no credentials; the default is "default".
        api_key: API key or JSON Web Token, if the gateway asks for credentials; the default is SLUICE_API_KEY.
        ca: PEM file with the authorities of the gateway's certificate, or "system" for the public ones; the default is
            SLUICE_CA. Without it the connection is not encrypted.
        cert, key: PEM files of the caller's certificate and key, if the gateway asks for a certificate; the defaults
            are SLUICE_CERT and SLUICE_KEY.

    Attributes:
        address: Address of the gateway or gateways.
        jobs: Calls about offline jobs.

    Raises:
        InvalidRequest: The address, the key or a file cannot be used.
    """

    def __init__(
        self,
        address: str | None = None,
        retry: RetryPolicy | None = None,
        tenant: str | None = None,
        api_key: str | None = None,
        *,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
        self.address = channel.resolve_address(address)
        super().__init__(channel.call_metadata(tenant, api_key), retry or RetryPolicy())
        self._channel = channel.open_blocking(self.address, channel.credentials_of(ca, cert, key))
        self.jobs = Jobs(self._channel, self._metadata, self._retry)
        self._stub = InferenceServiceStub(self._channel)
        self._admin = AdminServiceStub(self._channel)
        self._safety = SafetyServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AnswerStream:
        """Stream an answer to `prompt`: text, a conversation or speech. `GenerateOptions` describes the options.

        A stream that breaks off is resumed at the same token, within the `RetryPolicy` and the deadline. The current
        OpenTelemetry span becomes the parent of the request's spans.

        Raises:
            InvalidRequest: A value does not fit its field. All other errors are raised by the stream.
        """
        timeout_s = options.get("timeout_s")
        channel.check_timeout(timeout_s)
        answer = ResumableAnswer(generate_request(prompt, options))
        metadata = (*self._metadata, *channel.trace_metadata())
        return AnswerStream(self._events(answer, timeout_s, metadata))

    def generate_several(
        self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]
    ) -> tuple[Answer, ...]:
        """Return `n` answers to one prompt, at most 16. They only differ if `temperature` is above 0.

        The tokens of the prompt are computed and counted once.

        Raises:
            SluiceError: An answer failed.
        """
        timeout_s = options.get("timeout_s")
        channel.check_timeout(timeout_s)
        several = SeveralAnswers(generate_request(prompt, options, n))
        metadata = (*self._metadata, *channel.trace_metadata())
        for _ in self._events(several, timeout_s, metadata):
            pass
        return several.build()

    def generate_batch(
        self,
        prompts: Sequence[Prompt | pb.GenerateRequest],
        *,
        concurrency: int = BATCH_CONCURRENCY,
        one_call: bool = False,
        done: Callable[[int, Answer | SluiceError], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AnswerBatch:
        """Answer all `prompts`, and return an answer or an error for each, in their order.

        The priority is "standard" unless `options` say otherwise. Use a job for work that must survive this process.

        Args:
            prompts: Texts and conversations, to which `options` apply, or complete requests.
            concurrency: Most requests that run at the same time; without effect with `one_call`.
            one_call: Whether to send one call of GenerateBatch. It takes at most 256 prompts and has one deadline
                (`timeout_s`, by default `TEXTS_S`); it is not resumed, and its outcomes have costs.
            done: Called with the position and the outcome of each prompt when it is known; with `one_call` at the end.
                The blocking client calls it from several threads.

        Raises:
            InvalidRequest: A value does not fit its field.
            SluiceError: With `one_call`, the call as a whole failed.
        """
        timeout_s = options.get("timeout_s")
        channel.check_timeout(timeout_s)
        requests = batch_requests(prompts, options)
        if one_call and requests:
            began, limit_s = monotonic(), TEXTS_S if timeout_s is None else timeout_s
            whole = one_request(requests)
            response = self._lookup(self._stub.GenerateBatch, whole, limit_s)
            batch = answer_batch(response, monotonic() - began)
            if done is not None:
                for at, outcome in enumerate(batch.outcomes):
                    done(at, outcome)
            return batch
        metadata = (*self._metadata, *channel.trace_metadata())
        began = monotonic()

        def ask(at: int) -> Answer | SluiceError:
            outcome: Answer | SluiceError
            try:
                events = self._events(ResumableAnswer(requests[at]), timeout_s, metadata)
                outcome = AnswerStream(events).answer()
            except SluiceError as error:
                outcome = error
            if done is not None:
                done(at, outcome)
            return outcome

        outcomes = all_blocking(ask, len(requests), concurrency)
        return AnswerBatch(outcomes, monotonic() - began)

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str = "",
        dimensions: int = 0,
        normalize: bool | None = None,
        truncate: bool = False,
        timeout_s: float = TEXTS_S,
        **options: Unpack[TextOptions],
    ) -> Embeddings:
        """Return the embeddings of any number of texts; long lists are sent in several concurrent calls.

        Args:
            texts: Texts to embed.
            prompt_name: Name of the model's prompt that precedes each text, such as "query" or "document"; empty for
                the model's default.
            dimensions: Number of first dimensions to keep; 0 keeps all.
            normalize: Whether to scale embeddings to length 1; None for the default of the model's folder.
            truncate: Whether to truncate texts that are too long; otherwise they are an error.
            timeout_s: Time that each call may take, in seconds.
            options: Model, priority and labels.

        Raises:
            SluiceError: A text cannot be embedded.
        """
        requests = embed_requests(
            texts,
            options,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )

        def ask(at: int) -> pb.EmbedResponse:
            return self._lookup(self._stub.Embed, requests[at], timeout_s)

        return embeddings_of(all_blocking(ask, len(requests), CALLS))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        truncate: bool = False,
        timeout_s: float = TEXTS_S,
        **options: Unpack[TextOptions],
    ) -> pb.RerankResponse:
        """Rank `documents` by relevance to `query`, and return the best `top_n`, best first; 0 returns all.

        Documents that are too long are an error unless `truncate` is true.

        Raises:
            SluiceError: The documents cannot be ranked.
        """
        fields = {"query": query, "documents": documents, "top_n": top_n, "truncate": truncate}
        request = text_request(pb.RerankRequest(), options, **fields)
        return self._lookup(self._stub.Rerank, request, timeout_s)

    def score(
        self,
        answers: Sequence[str],
        prompt: Prompt | None = None,
        *,
        raw_prompt: bool = False,
        timeout_s: float = TEXTS_S,
        **options: Unpack[TextOptions],
    ) -> pb.ScoreResponse:
        """Return the log-probabilities of given `answers` to `prompt`; without a prompt, of `answers` as whole texts.

        Raises:
            SluiceError: The answers cannot be scored.
        """
        request = pb.ScoreRequest()
        if prompt is not None:
            set_prompt(request, prompt)
        text_request(request, options, answers=answers, raw_prompt=raw_prompt)
        return self._lookup(self._stub.Score, request, timeout_s)

    def count_tokens(
        self,
        prompt: Prompt,
        model: str = AUTO,
        *,
        raw_prompt: bool = False,
        timeout_s: float = LOOKUP_S,
    ) -> pb.CountTokensResponse:
        """Count the tokens of `prompt`, including the chat template unless `raw_prompt` is true.

        Raises:
            SluiceError: The tokens cannot be counted.
        """
        request = count_request(prompt, model, raw_prompt)
        return self._lookup(self._stub.CountTokens, request, timeout_s)

    def list_models(self, *, timeout_s: float = LOOKUP_S) -> list[pb.Model]:
        """Return the models of the mesh, in the order of its configuration.

        Raises:
            SluiceError: The models cannot be listed.
        """
        response = self._lookup(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return list(response.models)

    def check_safety(
        self,
        text: str,
        labels: Mapping[str, str] | None = None,
        *,
        timeout_s: float = LOOKUP_S,
    ) -> safety_pb2.CheckTextResponse:
        """Return how the safety policy treats `text` as the prompt of a request with `labels`.

        Raises:
            SluiceError: The text cannot be checked. A text that the policy blocks is not an error.
        """
        request = check_request(text, labels or {})
        return self._lookup(self._safety.CheckText, request, timeout_s)

    def explain(
        self, request_id: str = "", *, trace_id: str = "", timeout_s: float = LOOKUP_S
    ) -> admin_pb2.GetRequestRecordResponse:
        """Return the record of a request: every decision about it. Records exist shortly after the request has ended.

        Name the request by its id or by the id of its trace, which returns the latest request of the trace.

        Raises:
            RecordUnknown: There is no record of the request.
            SluiceError: The record cannot be read.
        """
        request = admin_pb2.GetRequestRecordRequest(request_id=request_id, trace_id=trace_id)
        return self._lookup(self._admin.GetRequestRecord, request, timeout_s)

    def requests(
        self,
        *,
        tenant: str = "",
        model: str = "",
        limit: int = 100,
        timeout_s: float = LOOKUP_S,
    ) -> admin_pb2.ListRequestsResponse:
        """Return the running requests of all gateways, oldest first; `limit` is at most 1000.

        Raises:
            SluiceError: The requests cannot be listed.
        """
        request = admin_pb2.ListRequestsRequest(tenant=tenant, model=model, limit=limit)
        return self._lookup(self._admin.ListRequests, request, timeout_s)

    def cancel_requests(
        self,
        *request_ids: str,
        tenant: str = "",
        timeout_s: float = LOOKUP_S,
    ) -> admin_pb2.CancelRequestsResponse:
        """Cancel running requests, by id or all of a tenant, whoever sent them; their callers get `Cancelled`.

        Raises:
            RequestUnknown: None of `request_ids` is running.
            SluiceError: The requests cannot be cancelled.
        """
        request = admin_pb2.CancelRequestsRequest(request_ids=request_ids, tenant=tenant)
        return self._lookup(self._admin.CancelRequests, request, timeout_s)

    def drain_worker(
        self,
        model: str,
        worker: str,
        *,
        undo: bool = False,
        timeout_s: float = LOOKUP_S,
    ) -> admin_pb2.DrainWorkerResponse:
        """Send no new requests to a worker, until it is called with `undo`; requests in the worker run to their end.

        Raises:
            WorkerUnknown: The model has no such worker.
            SluiceError: The worker cannot be drained.
        """
        request = admin_pb2.DrainWorkerRequest(model=model, worker=worker, undo=undo)
        return self._lookup(self._admin.DrainWorker, request, timeout_s)

    def metrics(self, *names: str, timeout_s: float = LOOKUP_S) -> admin_pb2.ReadMetricsResponse:
        """Return the metrics of all processes with these `names`, or all; docs/operate/telemetry.md lists them.

        Raises:
            SluiceError: The metrics cannot be read.
        """
        request = admin_pb2.ReadMetricsRequest(names=names)
        return self._lookup(self._admin.ReadMetrics, request, timeout_s)

    def audit(
        self, request_id: str, *, timeout_s: float = LOOKUP_S
    ) -> admin_pb2.GetAuditEntryResponse:
        """Return the audit entry of a request: the decisions of the safety policy, without text.

        Raises:
            RecordUnknown: There is no entry; requests without findings and without a guard have none.
            SluiceError: The entry cannot be read.
        """
        request = admin_pb2.GetAuditEntryRequest(request_id=request_id)
        return self._lookup(self._admin.GetAuditEntry, request, timeout_s)

    def feedback(self, request_id: str, grade: float, *, timeout_s: float = LOOKUP_S) -> None:
        """Grade the answer of a request from 0 (useless) to 1 (right). A later grade replaces an earlier one.

        Raises:
            RecordUnknown: There is no record of the request.
            SluiceError: The grade cannot be stored.
        """
        request = admin_pb2.SubmitFeedbackRequest(request_id=request_id, grade=grade)
        self._lookup(self._admin.SubmitFeedback, request, timeout_s)

    def outcomes(
        self,
        tenants: Sequence[str] = (),
        *,
        since_unix_ms: int = 0,
        timeout_s: float = LISTING_S,
    ) -> Iterator[admin_pb2.StreamOutcomesResponse]:
        """Yield outcomes that compare two models on requests of `tenants`, by default of all tenants that store them.

        Raises:
            OutcomesNotKept: A named tenant, or every tenant, does not store outcomes.
            SluiceError: The outcomes cannot be listed.
        """
        channel.check_timeout(timeout_s)
        since = timestamp(since_unix_ms) if since_unix_ms else None
        request = admin_pb2.StreamOutcomesRequest(tenants=tenants, since_time=since)
        call = self._admin.StreamOutcomes(request, timeout=timeout_s, metadata=self._metadata)
        with channel.reading(call):
            for response in call:
                yield response

    def list_tenants(
        self, tenant: str = "", *, timeout_s: float = LOOKUP_S
    ) -> admin_pb2.ListTenantsResponse:
        """Return how much `tenant` uses of its limits; empty for each tenant that has limits or running requests.

        Raises:
            SluiceError: The use cannot be listed.
        """
        request = admin_pb2.ListTenantsRequest(tenant=tenant)
        return self._lookup(self._admin.ListTenants, request, timeout_s)

    def forget_tenant(
        self, tenant: str, *, timeout_s: float = LISTING_S
    ) -> admin_pb2.ForgetTenantResponse:
        """Delete what is stored of `tenant`, API keys too, and cancel its requests. The call can be repeated.

        Jobs and costs stay. Gateways in the response's `unreached_gateways` may serve cached answers until they expire.

        Raises:
            SluiceError: Not everything was deleted.
        """
        request = admin_pb2.ForgetTenantRequest(tenant=tenant)
        return self._lookup(self._admin.ForgetTenant, request, timeout_s)

    def safety_dry_run(self, *, timeout_s: float = LOOKUP_S) -> safety_pb2.GetDryRunResponse:
        """Return how often the policy in dry run would have decided differently, at all gateways together.

        Raises:
            SluiceError: The gateway does not respond, or no policy is in dry run.
        """
        return self._lookup(self._safety.GetDryRun, safety_pb2.GetDryRunRequest(), timeout_s)

    def router_health(self, *, timeout_s: float = LOOKUP_S) -> list[admin_pb2.RouterHealth]:
        """Return whether the learned routers have drifted, by the traffic of all gateways.

        Raises:
            SluiceError: The gateway does not respond.
        """
        request = admin_pb2.GetRouterHealthRequest()
        response = self._lookup(self._admin.GetRouterHealth, request, timeout_s)
        return list(response.routers)

    def clear_answers(
        self,
        tenant: str = "",
        model: str = "",
        answer_key: str = "",
        *,
        timeout_s: float = LOOKUP_S,
    ) -> list[str]:
        """Delete cached answers: those of a tenant, of a model or of both, a single one by its key, or all.

        Returns:
            Gateways that did not respond; they may serve cached answers until they expire.

        Raises:
            SluiceError: The answers cannot be deleted, or it is not known whether they were.
        """
        request = admin_pb2.ClearAnswersRequest(tenant=tenant, model=model, answer_key=answer_key)
        response = self._lookup(self._admin.ClearAnswers, request, timeout_s)
        return list(response.unreached_gateways)

    def close(self) -> None:
        """Close the connection, and cancel calls that are still running."""
        self._channel.close()

    def _events(
        self,
        answer: ResumableAnswer | SeveralAnswers,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Generator[Event]:
        retries = Retries(self._retry, timeout_s, monotonic())
        while not answer.complete:
            call = self._stub.Generate(
                answer.next_request(),
                timeout=retries.timeout_s(monotonic()),
                metadata=metadata,
            )
            # A stream that ends with OK and without `Finished`, as behind some proxies, is resumed as well.
            error: SluiceError = channel.ConnectionLost(
                "the stream ended before the answer was complete"
            )
            try:
                with channel.reading(call):
                    for response in call:
                        for event in answer.accept(response):
                            retries.saw(event)
                            yield event
            except SluiceError as failed:
                error = failed
            if not answer.complete:
                sleep(retries.wait_s_after(error, monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
