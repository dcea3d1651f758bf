"""The control API: probes, metrics, the fleet, explain, and Mooncake's indexer API. In the parent's own loop.

    GET  /health     200 while this process runs                                                      open
    GET  /ready      200 while a worker takes requests and an instance is alive, else 503 and why     open
    GET  /metrics    Prometheus' text format
    GET  /fleet      everything, for people
    GET  /explain/ID why a request went where it went
    POST /register /unregister /query /query_by_hash
    POST /drain      take no more requests, here and in every worker

A worker that is stuck makes nothing here late but what asks for its word, and that by `workers.ASK_S` at most; the
probes ask nobody. The counts of workers are added up for /metrics; those of a worker that does not answer are what
they were when it did, so that no sum goes back while somebody is busy.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from headwater.conductor.control import indexer
from headwater.conductor.control.access import Access
from headwater.conductor.control.merge import Counted, State, merged, percentiles
from headwater.conductor.control.replies import Rejected, errors_as_json, quiet_log, read_body, reply
from headwater.conductor.control.workers import Answer, Workers
from headwater.conductor.counts import BOUNDS_S
from headwater.errors import ConfigError, UnavailableError
from headwater.fleetfile.model import ConductorSpec
from headwater.values import split_address
from headwater.version import VERSION

Render = Callable[[Mapping[int, State], Mapping[str, float]], bytes]
"""`metrics.conductor.render`: the counts by row, see `merge.Counted`, and what the parent knows itself."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
QUESTIONS = 8
"""Of the indexer's that are under way; more are told to come back."""
ID_CHARACTERS = 128
LATENCIES = ("ttft_seconds", "tpot_seconds")
BACKLOG = 256


class Control:
    """The parent's control API. `drain` is called once, when somebody asks for it."""

    def __init__(
        self,
        spec: ConductorSpec,
        directory: Path,
        render: Render,
        drain: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is private; the workers' sockets are in it. Raises ConfigError."""
        self.workers = Workers(directory, clock)
        self._spec, self._render, self._drain, self._clock = spec, render, drain, clock
        self._began_s = clock()
        self._draining = False
        self._questions = asyncio.Semaphore(QUESTIONS)
        self._counted = Counted()
        access = Access(spec)
        application = web.Application(middlewares=[errors_as_json, access.check], client_max_size=indexer.QUERY_BYTES)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/fleet", self._fleet),
                web.get("/explain/{id}", self._explain),
                web.post("/register", self._register),
                web.post("/unregister", self._unregister),
                web.post("/query", self._question),
                web.post("/query_by_hash", self._question),
                web.post("/drain", self._start_drain),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, logger=quiet_log())
        self.url = ""

    async def start(self) -> None:
        """Listen; raises ConfigError if the address cannot be had."""
        host, port = split_address(self._spec.control)
        try:
            listening = socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"conductor.control = {self._spec.control}: {os.strerror(error.errno or 0)}; stop what listens there, "
                "or choose another port"
            ) from error
        listening.setblocking(False)
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=BACKLOG).start()

    async def close(self) -> None:
        """Listen no more, and ask no worker any more. May be called again."""
        await self._runner.cleanup()
        await self.workers.close()

    def draining(self) -> None:
        """Somebody else began to drain: say so from now on."""
        self._draining = True

    def why_not_ready(self) -> str:
        """'' if requests are served."""
        beats = [beat for beat in self.workers.beats().values() if beat is not None]
        if self._draining:
            return "draining"
        if not any(beat.get("ready") for beat in beats):
            return "no worker is ready"
        if not any(beat.get("ready") and beat.get("alive") for beat in beats):
            return "no instance is alive"
        return ""

    async def _health(self, _: web.Request) -> web.Response:
        return reply({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        reason = self.why_not_ready()
        return reply({"ready": not reason, "reason": reason}, 503 if reason else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        states, _silent = await self._states()
        beats = self.workers.beats()
        self._counted.take(states, beats.keys())
        about = {
            "uptime_seconds": self._clock() - self._began_s,
            "draining": float(self._draining),
            "ready": float(not self.why_not_ready()),
            "workers": float(len(beats)),
            "workers_heard": float(sum(beat is not None for beat in beats.values())),
            "workers_ended": float(self._counted.ended),
            "instances_alive": float(max((int(beat.get("alive", 0)) for beat in beats.values() if beat), default=0)),
        }
        return web.Response(body=self._render(self._counted.by_row, about), headers={"Content-Type": PROMETHEUS})

    async def _fleet(self, _: web.Request) -> web.Response:
        states, silent = await self._states()
        ages = self.workers.silent_s()
        self._counted.take(states, ages.keys())
        sums = self._counted.sums()
        rows = [
            {name: states.get(row, {}).get(name) for name in ("pid", "ready", "draining", "alive", "instances")}
            | {"worker": row, "heard_s": age, "trouble": silent.get(row, "")}
            for row, age in sorted(ages.items())
        ]
        reason = self.why_not_ready()
        return reply(
            {
                "version": VERSION,
                "uptime_s": self._clock() - self._began_s,
                "listen": self._spec.listen,
                "policy": self._spec.policy,
                "ready": not reason,
                "reason": reason,
                "registered": len(self.workers.registered),
                "latencies": {name: percentiles(sums, name, BOUNDS_S) for name in LATENCIES},
                "workers": rows,
            }
            | merged([states[row] for row in sorted(states)])
        )

    async def _explain(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        if len(request_id) > ID_CHARACTERS:
            raise Rejected(400, "wrong_value", f"an id has {ID_CHARACTERS} characters at most", "id")
        answer, silent = await self.workers.ask_until("GET", "/explain/" + quote(request_id, safe=""), 200)
        if answer is not None:
            return _passed_on(answer)
        if silent:
            rows = ", ".join(map(str, silent))
            raise Rejected(503, "unavailable", f"the others know no such request, and worker {rows} does not answer")
        last = f"the last {self._spec.explained:,} of each worker are remembered"
        raise Rejected(404, "not_remembered", f"no worker remembers such a request; {last}")

    async def _register(self, request: web.Request) -> web.Response:
        body = await read_body(request, indexer.REGISTER_BYTES)
        publisher = indexer.read(body, indexer.Publisher)
        self.workers.check_room(publisher)
        answer = await self._tell_all("/register", body)
        if answer.status == 200:
            self.workers.remember(publisher, body)
        return answer

    async def _unregister(self, request: web.Request) -> web.Response:
        body = await read_body(request, indexer.REGISTER_BYTES)
        self.workers.forget(indexer.read(body, indexer.Gone))
        return await self._tell_all("/unregister", body)

    async def _tell_all(self, path: str, body: bytes) -> web.Response:
        """Tell every worker; the first refusal is the answer. Who does not answer is told with its next new life, or
        by the other workers."""
        answers = [it for it in (await self.workers.ask_all("POST", path, body)).values() if isinstance(it, Answer)]
        if not answers:
            raise UnavailableError("no worker answers; see `headwater fleet`")
        return _passed_on(next((it for it in answers if it.status != 200), answers[0]))

    async def _question(self, request: web.Request) -> web.Response:
        if self._questions.locked():
            answer = reply({"error": {"code": "busy", "message": f"{QUESTIONS} questions are under way"}}, 429)
            answer.headers["Retry-After"] = "1"
            return answer
        async with self._questions:
            body = await read_body(request, indexer.QUERY_BYTES)
            return _passed_on(await self.workers.ask_any("POST", request.path, body))

    async def _start_drain(self, _: web.Request) -> web.Response:
        if not self._draining:
            self._draining = True
            await self.workers.ask_all("POST", "/drain")
            self._drain()
        return reply({"draining": True}, 202)

    async def _states(self) -> tuple[dict[int, State], dict[int, str]]:
        """What each worker says of itself; and of those that do not, why."""
        states: dict[int, State] = {}
        silent: dict[int, str] = {}
        for row, answer in (await self.workers.ask_all("GET", "/state")).items():
            try:
                if isinstance(answer, UnavailableError):
                    raise answer
                states[row] = answer.json()
            except UnavailableError as error:
                silent[row] = str(error)
        return states, silent


def _passed_on(answer: Answer) -> web.Response:
    """A worker's answer as ours."""
    return reply(answer.json(), answer.status)
