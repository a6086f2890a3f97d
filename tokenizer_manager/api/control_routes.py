"""Routes that do no work: probes, what the server is, control, metrics."""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from ... import __version__
from ...common.finish_reason import FINISH_ABORT
from ...common.messages import ControlReqOutput
from ...common.sampling_params import SamplingParams
from ...common.text_messages import StrEnd
from ..access import ADMIN_KEY_REQUIRED
from ..accounting import error_code
from ..api_error import APIError, bad_request, forbidden, json_response, unavailable
from ..call import Call, call_of
from ..families import GenerateReq
from ..json_body import read_json
from ..metrics import CONTENT_TYPE
from ..req_state import CLIENT_ABORT
from ..server_status import Status
from ..tokenizer_manager import TokenizerManager
from .generate_protocol import AbortBody, PauseBody

ABORT = msgspec.json.Decoder(AbortBody)
PAUSE = msgspec.json.Decoder(PauseBody)
PROBE_SECONDS = 20.0


class ControlRoutes:
    """Handlers over one tokenizer manager; `info` is what /server_info tells beside the state."""

    def __init__(self, manager: TokenizerManager, info: Mapping[str, Any]) -> None:
        self._manager = manager
        self._info = info
        self._probing: asyncio.Task[str] | None = None

    async def livez(self, request: web.Request) -> web.Response:
        """GET /livez: 200 unless the server has failed or its scheduler has fallen silent."""
        if not self._manager.is_alive:
            raise unavailable(
                self._manager.failure or f"{self._manager.silent_process} has fallen silent.", "not_alive"
            )
        return json_response(self._state())

    async def readyz(self, request: web.Request) -> web.Response:
        """GET /readyz and /health: 200 while the server takes work."""
        self._manager.check_accepting()
        if not self._manager.is_alive:
            raise unavailable(f"{self._manager.silent_process} has fallen silent.", "not_alive")
        return json_response(self._state())

    async def health_generate(self, request: web.Request) -> web.Response:
        """GET /health_generate: generate one token. While paused nothing is generated, and nothing is wrong.

        It needs no key, so whoever asks while a token is on its way waits for that one: many ask for no more than one.
        """
        if self._manager.is_paused:
            return json_response(self._state())
        if self._probing is None or self._probing.done():
            self._probing = asyncio.ensure_future(self._probe())
        illness = await asyncio.shield(self._probing)
        if illness:
            raise unavailable(illness, "not_alive")
        return json_response(self._state())

    async def _probe(self) -> str:
        """What is wrong with a request for one token, "" for nothing. It is the server's own, whoever asked."""
        manager = self._manager
        call = Call(manager.clock(), secrets.token_hex(12))
        end: StrEnd | None = None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                end = await self._one_token(call)
        except TimeoutError:
            is_alive = manager.is_paused or manager.last_output > call.arrival
            return "" if is_alive else f"No token came within {PROBE_SECONDS:g} s."
        except APIError as error:
            return error.message
        return "" if end is not None and _shows_life(end) else "The request for one token failed."

    async def _one_token(self, call: Call) -> StrEnd | None:
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        first_id = self._manager.encoder.tokenizer.bos_token_id or 0
        probe = GenerateReq(input_ids=[first_id], sampling_params=params)
        with self._manager.generate(call, [probe], stream=False) as generation:
            while not generation.done:
                await generation.next()
        return generation.reqs[0].end

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: arguments, model, load."""
        manager = self._manager
        return json_response(
            {
                "version": __version__,
                **self._state(),
                "served_model_names": manager.served_model_names,
                "model": manager.model and msgspec.structs.asdict(manager.model),
                "load": manager.load and msgspec.structs.asdict(manager.load),
                "num_open": manager.num_open,
                "num_inflight": manager.num_inflight,
                **self._info,
            }
        )

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return json_response({"version": __version__})

    async def model_info(self, request: web.Request) -> web.Response:
        """GET /get_model_info, in SGLang's words."""
        args = self._info.get("args", {})
        return json_response(
            {
                "model_path": self._manager.served_model_names[0],
                "tokenizer_path": self._manager.served_model_names[0],
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "max_model_len": self._manager.model and self._manager.model.context_len,
                "dtype": args.get("dtype"),
            }
        )

    async def flush_cache(self, request: web.Request) -> web.Response:
        """POST /flush_cache: empty the prefix cache; refused while anything runs."""
        return _control_answer(await self._manager.flush_cache(), "cache_in_use")

    async def pause_generation(self, request: web.Request) -> web.Response:
        """POST /pause_generation: plan no step; what came is aborted (the default), retracted, or left in place."""
        self._manager.check_started()
        body = await read_json(request, PAUSE) if request.body_exists else PauseBody()
        return _control_answer(await self._manager.pause_generation(body.mode), "pause_refused")

    async def continue_generation(self, request: web.Request) -> web.Response:
        """POST /continue_generation: go on after a pause."""
        self._manager.check_started()
        return _control_answer(await self._manager.continue_generation(), "continue_refused")

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request: end one request by its id, or all (which is for the admin)."""
        body, caller = await read_json(request, ABORT), call_of(request).caller
        if body.abort_all:
            if not caller.is_admin:
                raise forbidden("abort_all needs the key that the server got with --admin-api-key.", ADMIN_KEY_REQUIRED)
            return json_response({"num_aborted": self._manager.abort_all()})
        if not body.rid:
            raise bad_request("rid or abort_all is required", "rid", "missing_field")
        return json_response({"num_aborted": self._manager.abort(body.rid, caller)})

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics: for Prometheus."""
        return web.Response(body=self._manager.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    def _state(self) -> dict[str, Any]:
        manager = self._manager
        state: dict[str, Any] = {"status": manager.status.value}
        if manager.status is Status.STARTING:
            state["loaded"] = round(manager.loaded_share, 3)
        if manager.model is not None:
            state["paused"] = manager.is_paused
            state["scheduler_silent_seconds"] = round(manager.silent_seconds, 3)
        return state


def _control_answer(answer: ControlReqOutput, refusal: str) -> web.Response:
    """200, or the APIError of the code `refusal`."""
    if not answer.success:
        raise bad_request(answer.message, code=refusal)
    return json_response({"success": True, "message": answer.message})


def _shows_life(end: StrEnd) -> bool:
    """Whether an end says that all processes do their work: an abort came through all, so did a full queue's refusal."""
    reason = end.finish_reason
    return (
        not isinstance(reason, FINISH_ABORT) or reason.status_code == CLIENT_ABORT or error_code(reason) == "queue_full"
    )
