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
    """The events of one answer. The call begins with the first event that is asked for.

    Use it as a context manager, or close it, when you may not read it to its end: leaving it cancels the request.
    """

    def __init__(self, events: Generator[Event]) -> None:
        self._events = events

    def __next__(self) -> Event:
        return next(self._events)

    def answer(self) -> Answer:
        """Read to the end and return the answer.

        Raises:
            SluiceError: the answer is not complete.
        """
        builder = AnswerBuilder()
        with self:
            for event in self:
                builder.add(event)
        return builder.build()

    def close(self) -> None:
        """Cancel the call if it still runs."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(Caller):
    """Asks a Sluice gateway. Errors are the classes of `sluice.errors`.

    Use it as a context manager. The asyncio client belongs to the loop that it was made in. The blocking client may be
    shared between threads; one stream belongs to one thread.

    Args:
        address: HOST:PORT of the gateway, or of several with commas between them; a name may stand for several.
            Unset: SLUICE_ADDRESS, else 127.0.0.1:50051.
        retry: how often and how soon to try again.
        tenant: who pays, where the gateway asks for no credentials; unset: "default".
        api_key: who calls, where it does: an API key or a JSON Web Token. Unset: SLUICE_API_KEY.
        ca: PEM file of the authorities of the gateway's certificate, or "system" for public ones; unset: SLUICE_CA,
            else the call is not encrypted.
        cert, key: PEM files of the caller, where the gateway asks for a certificate; unset: SLUICE_CERT, SLUICE_KEY.

    Attributes:
        jobs: offline jobs.
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
        """Request an answer to `prompt`: text, a conversation or speech. `GenerateOptions` lists what else can be set.

        A stream that breaks is resumed where it was, a few times and within the deadline. The current OpenTelemetry
        span becomes the parent of the request's spans.

        Raises:
            InvalidRequest: at once, when a value cannot travel. Every other error comes from the stream.
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

        The prompt is computed and counted once.

        Raises:
            SluiceError: one of them is not complete.
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
        """Return the answers to all `prompts`, in their order; one that failed has its error instead.

        Of class "standard", unless `options` say otherwise. What shall survive this process is a job.

        Args:
            prompts: texts and conversations, which `options` hold for; requests go as they are.
            concurrency: how many are asked at the same time.
            one_call: ask with one call of GenerateBatch, which the gateway bounds: at most 256 prompts, one deadline
                (`timeout_s`), no resume. Costs are known then, and `done` is called when the call has ended.
            done: called with the position of each outcome as it comes; of the blocking client from several threads.

        Raises:
            InvalidRequest: at once, when a value cannot travel.
            SluiceError: of `one_call`, when the call as a whole fails.
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
        """Return the embeddings of any number of texts; many are sent in several calls, a few at a time.

        Args:
            texts: The texts, any number.
            prompt_name: of the model's prompt before each text, such as "query" or "document"; empty: its default.
            dimensions: so many numbers of each embedding; 0: all.
            normalize: whether embeddings have length 1; None: as the model's folder says.
            truncate: whether texts that are too long are cut, else they are an error.
            timeout_s: Upper bound of each call, in seconds.

        Raises:
            SluiceError: a text cannot be embedded; of several calls the first error.
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
        """Return the `top_n` documents that fit `query` best, the best first; 0 returns all.

        Raises:
            SluiceError: they cannot be ranked.
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
        """Return the log-probabilities of given `answers` to `prompt`; without a prompt, of texts of their own.

        Raises:
            SluiceError: they cannot be scored.
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
        """Count the tokens that `prompt` takes of the model's context.

        Raises:
            SluiceError: it cannot be counted.
        """
        request = count_request(prompt, model, raw_prompt)
        return self._lookup(self._stub.CountTokens, request, timeout_s)

    def list_models(self, *, timeout_s: float = LOOKUP_S) -> list[pb.Model]:
        """Return the models, in the order of the mesh's configuration.

        Raises:
            SluiceError: the gateway does not answer.
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
        """Return what the safety policies would do about `text` as the prompt of a request with `labels`.

        Raises:
            SluiceError: it cannot be checked; that it would be blocked is no error.
        """
        request = check_request(text, labels or {})
        return self._lookup(self._safety.CheckText, request, timeout_s)

    def explain(
        self, request_id: str = "", *, trace_id: str = "", timeout_s: float = LOOKUP_S
    ) -> admin_pb2.GetRequestRecordResponse:
        """Return everything that was decided about a request, a moment after its end.

        The request is named by its id, or by the id of its trace: then of several the latest is explained.

        Raises:
            RecordUnknown: nothing is kept of it.
            SluiceError: it cannot be looked up.
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
        """Return the running requests of all gateways, the oldest first; `limit` is at most 1000.

        Raises:
            SluiceError: they cannot be listed.
        """
        request = admin_pb2.ListRequestsRequest(tenant=tenant, model=model, limit=limit)
        return self._lookup(self._admin.ListRequests, request, timeout_s)

    def cancel_requests(
        self,
        *request_ids: str,
        tenant: str = "",
        timeout_s: float = LOOKUP_S,
    ) -> admin_pb2.CancelRequestsResponse:
        """Cancel running requests, or all of a tenant, whoever sent them: their callers get `Cancelled`.

        Raises:
            RequestUnknown: none of `request_ids` runs.
            SluiceError: they cannot be cancelled.
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
        """Send no new requests to a worker until `undo`; those in it run to their end.

        Raises:
            WorkerUnknown: the model has no such worker.
            SluiceError: it cannot be drained.
        """
        request = admin_pb2.DrainWorkerRequest(model=model, worker=worker, undo=undo)
        return self._lookup(self._admin.DrainWorker, request, timeout_s)

    def metrics(self, *names: str, timeout_s: float = LOOKUP_S) -> admin_pb2.ReadMetricsResponse:
        """Return the metrics of all processes with these `names`, or all; docs/operate/telemetry.md lists them.

        Raises:
            SluiceError: they cannot be read.
        """
        request = admin_pb2.ReadMetricsRequest(names=names)
        return self._lookup(self._admin.ReadMetrics, request, timeout_s)

    def audit(
        self, request_id: str, *, timeout_s: float = LOOKUP_S
    ) -> admin_pb2.GetAuditEntryResponse:
        """Return the audit entry of a request: the decisions of its safety layer, without text.

        Raises:
            RecordUnknown: nothing; requests without a finding and without a guard leave no entry.
            SluiceError: it cannot be looked up.
        """
        request = admin_pb2.GetAuditEntryRequest(request_id=request_id)
        return self._lookup(self._admin.GetAuditEntry, request, timeout_s)

    def feedback(self, request_id: str, grade: float, *, timeout_s: float = LOOKUP_S) -> None:
        """Grade the answer of a request: 0 is useless, 1 is right. A later grade replaces an earlier one.

        Raises:
            RecordUnknown: nothing is kept of the request.
            SluiceError: the grade could not be stored.
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
        """Yield how two models did on requests of `tenants` that let their prompts be kept; of all if none is named.

        Raises:
            OutcomesNotKept: one of them, or every tenant, does not.
            SluiceError: they cannot be listed.
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
        """Return what `tenant` uses of its limits; empty: each tenant that has limits or running requests.

        Raises:
            SluiceError: the gateway does not answer.
        """
        request = admin_pb2.ListTenantsRequest(tenant=tenant)
        return self._lookup(self._admin.ListTenants, request, timeout_s)

    def forget_tenant(
        self, tenant: str, *, timeout_s: float = LISTING_S
    ) -> admin_pb2.ForgetTenantResponse:
        """Delete what is stored of `tenant`, except its jobs. Idempotent.

        Raises:
            SluiceError: not everything could be deleted.
        """
        request = admin_pb2.ForgetTenantRequest(tenant=tenant)
        return self._lookup(self._admin.ForgetTenant, request, timeout_s)

    def safety_dry_run(self, *, timeout_s: float = LOOKUP_S) -> safety_pb2.GetDryRunResponse:
        """Return how often the policy in dry run would have decided otherwise, over all gateways.

        Raises:
            SluiceError: the gateway does not answer, or no policy is under trial.
        """
        return self._lookup(self._safety.GetDryRun, safety_pb2.GetDryRunRequest(), timeout_s)

    def router_health(self, *, timeout_s: float = LOOKUP_S) -> list[admin_pb2.RouterHealth]:
        """Return whether the learned routers have drifted, on the traffic of all gateways.

        Raises:
            SluiceError: the gateway does not answer.
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
        """Delete cached answers: of a tenant, of a model, a single one, or all.

        Returns:
            The gateways that did not answer: they may give out what they have in memory until it is too old.

        Raises:
            SluiceError: nothing is forgotten.
        """
        request = admin_pb2.ClearAnswersRequest(tenant=tenant, model=model, answer_key=answer_key)
        response = self._lookup(self._admin.ClearAnswers, request, timeout_s)
        return list(response.unreached_gateways)

    def close(self) -> None:
        """Close the connection and cancel what still runs."""
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
            error: SluiceError = channel.ended_early()
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
